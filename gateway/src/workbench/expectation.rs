//! Comparing a report with what somebody expects of it.

use serde_json::Value;

/// Where a report is not as expected. Members that are not expected do not matter; everything else must be equal.
pub fn differences(expected: &Value, found: &Value) -> Vec<String> {
    let mut differences = Vec::new();
    compare("", expected, found, &mut differences);
    differences
}

fn compare(at: &str, expected: &Value, found: &Value, differences: &mut Vec<String>) {
    let here = || if at.is_empty() { "the report" } else { at };
    match (expected, found) {
        (Value::Object(expected), Value::Object(found)) => {
            for (name, expected) in expected {
                let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                match found.get(name) {
                    Some(found) => compare(&at, expected, found, differences),
                    None => differences.push(format!("{at}: expected {expected}, found nothing")),
                }
            }
        }
        (Value::Array(wanted), Value::Array(there)) if wanted.len() == there.len() => {
            for (place, (expected, found)) in wanted.iter().zip(there).enumerate() {
                compare(&format!("{at}[{place}]"), expected, found, differences);
            }
        }
        (Value::Number(a), Value::Number(b)) if a == b || a.as_f64() == b.as_f64() => {}
        (expected, found) if expected == found => {}
        _ => differences.push(format!("{}: expected {expected}, found {found}", here())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_expected_does_not_matter_and_the_rest_must_be_equal() {
        let found = json!({"a": {"b": 1, "c": [1, {"d": 2, "e": 3}]}, "f": null});
        assert!(differences(&json!({}), &found).is_empty());
        assert!(differences(&json!({"a": {"b": 1.0, "c": [1, {"d": 2}]}, "f": null}), &found).is_empty());
        let wrong = json!({"a": {"b": 2, "c": [1]}, "f": 0, "g": null});
        let wanted = [
            "a.b: expected 2, found 1",
            r#"a.c: expected [1], found [1,{"d":2,"e":3}]"#,
            "f: expected 0, found null",
            "g: expected null, found nothing",
        ];
        assert_eq!(differences(&wrong, &found), wanted);
        assert_eq!(differences(&json!([]), &json!({})), ["the report: expected [], found {}"]);
        assert_eq!(differences(&json!({"a": {"c": [2, {}]}}), &found), ["a.c[0]: expected 2, found 1"]);
    }
}
