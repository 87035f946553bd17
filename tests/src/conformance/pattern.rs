//! Patterns of texts: `*` stands for any bytes, `{a,b}` for one of several texts. Everything else stands for itself; a
//! brace that opens no list does, too.

/// Whether the whole text is like the pattern.
pub fn matches(pattern: &str, text: &str) -> bool {
    alternatives(pattern).iter().any(|pattern| glob(pattern.as_bytes(), text.as_bytes()))
}

/// The pattern with each choice of its lists.
fn alternatives(pattern: &str) -> Vec<String> {
    let list = pattern.match_indices('{').find_map(|(open, _)| {
        let inside = pattern.get(open + 1..)?;
        let close = inside.find('}')?;
        let list = inside.get(..close)?;
        // JSON has braces, too: a list is of plain words.
        let plain = list.contains(',') && !list.contains(['"', '{', ':']);
        plain.then(|| (pattern.get(..open).unwrap_or_default(), list, inside.get(close + 1..).unwrap_or_default()))
    });
    let Some((before, list, after)) = list else { return vec![pattern.to_owned()] };
    let tails = alternatives(after);
    let each = |choice: &str| tails.iter().map(|tail| format!("{before}{choice}{tail}")).collect::<Vec<_>>();
    list.split(',').flat_map(each).collect()
}

fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(byte) if Some(byte) == text.get(t) => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, eaten)) => {
                    star = Some((at, eaten + 1));
                    p = at + 1;
                    t = eaten + 1;
                }
                None => return false,
            },
        }
    }
    pattern.get(p..).unwrap_or_default().iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
mod tests;
