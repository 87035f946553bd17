//! The body scanner and the rewriting of bodies.

use bytes::Bytes;
use serde_json::value::RawValue;
use turnstile_fleet::body::{BodyErrorKind, Edits, MAX_MEMBERS, Members, rewrite, scan};

use super::{input, model};

/// The scanner takes what serde_json takes and finds the same members. The input is the body.
pub fn body_scan(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let expected = model::members(data);
    match (scan(&body), &expected) {
        (Ok(found), Some(expected)) => agree(&found, expected),
        (Err(error), Some(expected)) => {
            assert_eq!(error.kind, BodyErrorKind::TooManyMembers, "{error}");
            assert!(expected.len() > MAX_MEMBERS, "{error}");
        }
        (Ok(found), None) => panic!("taken for an object of {} members", found.len()),
        (Err(error), None) => {
            assert_eq!(error.field, "");
            assert!(error.message.len() < 300, "{error}");
            let other_value = data.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'{')
                && serde_json::from_slice::<&RawValue>(data).is_ok();
            match error.kind {
                BodyErrorKind::NotObject => assert!(other_value, "{error}"),
                BodyErrorKind::NotJson => assert!(!other_value, "{error}"),
                // Whichever is met first.
                BodyErrorKind::TooManyMembers => assert!(data.len() > MAX_MEMBERS, "{error}"),
                BodyErrorKind::BadMember => panic!("{error}"),
            }
        }
    }
}

fn agree(found: &Members, expected: &[model::Member<'_>]) {
    assert!(expected.len() <= MAX_MEMBERS);
    assert_eq!(found.len(), expected.len());
    assert_eq!(found.is_empty(), expected.is_empty());
    assert!(found.keys().eq(expected.iter().map(|member| member.key.as_str())));
    assert!(!found.contains("no such key"));
    for member in expected {
        let key = member.key.as_str();
        let last = expected.iter().rfind(|other| other.key == key).expect("it is there").raw;
        assert!(found.contains(key));
        assert_eq!(found.raw(key), Some(last.as_bytes()));
        assert_eq!(found.value(key).as_deref(), Some(last.as_bytes()).filter(|raw| *raw != b"null"));
        assert_eq!(found.string(key).as_deref(), serde_json::from_str::<String>(last).ok().as_deref());
        assert_eq!(found.unsigned(key), serde_json::from_str::<u64>(last).ok());
        let truthy = match serde_json::from_str::<serde_json::Value>(last) {
            Ok(serde_json::Value::String(word)) => {
                ["true", "t", "yes", "y", "on", "1"].contains(&word.to_ascii_lowercase().as_str())
            }
            _ => matches!(last, "true" | "1" | "1.0"),
        };
        assert_eq!(found.truthy(key), truthy, "{last}");
    }
}

/// A rewritten body parses, has what the edits say, and otherwise keeps its bytes. The first line holds the edits, parted by
/// spaces: `-KEY` removes, `=KEY:JSON` sets; the rest is the body.
pub fn body_rewrite(data: &[u8]) {
    let (line, body) = input::first_line(data);
    let body = Bytes::copy_from_slice(body);
    let (Ok(found), Some(members)) = (scan(&body), model::members(&body)) else { return };
    let edits = read_edits(&line);
    let mut asked = Edits::new();
    for (key, value) in &edits {
        match value {
            Some(value) => asked.set(key.clone(), value.clone()),
            None => asked.remove(key.clone()),
        };
    }
    let out = rewrite(&found, &asked);

    // What must come out, as pieces of text: the members that stay, with the index of those left alone, then the new ones.
    let value_of = |key: &str| edits.iter().find(|(edited, _)| edited == key).map(|(_, value)| value);
    let mut pieces: Vec<(Option<usize>, String)> = Vec::new();
    let mut changed = false;
    for (index, member) in members.iter().enumerate() {
        let text = |from, to| std::str::from_utf8(&body[from..to]).expect("a body is UTF-8");
        match value_of(&member.key) {
            None => pieces.push((Some(index), text(member.start, member.end()).to_owned())),
            Some(value) => {
                changed = true;
                let is_last = members.iter().rposition(|other| other.key == member.key) == Some(index);
                if let (true, Some(value)) = (is_last, value) {
                    pieces.push((None, format!("{}{value}", text(member.start, member.value))));
                }
            }
        }
    }
    for (key, value) in &edits {
        if let (Some(value), false) = (value, members.iter().any(|member| member.key == *key)) {
            changed = true;
            pieces.push((None, format!("{}:{value}", serde_json::to_string(key).expect("a key"))));
        }
    }
    if !changed {
        assert_eq!(out.as_ptr(), body.as_ptr());
        assert_eq!(out.len(), body.len());
        return;
    }
    let open = body.iter().position(|b| *b == b'{').expect("an object has a brace") + 1;
    let mut rest =
        out.strip_prefix(&body[..members.first().map_or(open, |m| m.start)]).expect("what stands before the members");
    let mut before: Option<Option<usize>> = None;
    for (index, text) in &pieces {
        if let Some(before) = before {
            let comma = rest.iter().take_while(|b| **b != b'"').copied().collect::<Vec<_>>();
            assert_eq!(comma.trim_ascii(), b",");
            if let (Some(left), Some(right)) = (before, *index)
                && left + 1 == right
            {
                assert_eq!(comma, &body[members[left].end()..members[right].start]);
            }
            rest = &rest[comma.len()..];
        }
        rest = rest.strip_prefix(text.as_bytes()).expect("the next member");
        before = Some(*index);
    }
    assert_eq!(rest, &body[members.last().map_or(open, |m| m.end())..], "what stands behind the members");

    let again = scan(&out).expect("a rewritten body parses");
    assert_eq!(again.len(), pieces.len());
    for (key, value) in &edits {
        assert_eq!(again.raw(key), value.as_ref().map(|value| value.as_bytes()));
    }
}

/// The edits of a line; of several for one key the last counts, at the place of the first.
fn read_edits(line: &str) -> Vec<(String, Option<String>)> {
    let mut edits: Vec<(String, Option<String>)> = Vec::new();
    for word in line.split(' ').take(32) {
        let (key, value) = match (word.strip_prefix('-'), word.strip_prefix('=').and_then(|set| set.split_once(':'))) {
            (Some(key), _) => (key, None),
            (None, Some((key, value))) if serde_json::from_str::<&RawValue>(value).is_ok() => {
                (key, Some(value.trim().to_owned()))
            }
            _ => continue,
        };
        match edits.iter_mut().find(|(edited, _)| edited == key) {
            Some(edit) => edit.1 = value,
            None => edits.push((key.to_owned(), value)),
        }
    }
    edits
}
