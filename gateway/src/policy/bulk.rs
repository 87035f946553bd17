//! Many properties in one call: `turnstile.read` and `turnstile.write`. Each call of a guest into its host costs more than most
//! of what it asks for.
//!
//! Numbers are u32, little endian. A text is its length and its bytes; a length of `u32::MAX` stands for a value that is not
//! there.

use turnstile_plugins::{SecretHeaders, Status, StreamEnv};

/// Most properties in one call.
const MAX_PROPERTIES: usize = 64;

/// The values of the properties named in `arguments`, one name a line, in that order. What is `hidden` is not there.
pub fn read(env: &mut dyn StreamEnv, arguments: &[u8], hidden: SecretHeaders) -> Result<Vec<u8>, Status> {
    let mut out = Vec::with_capacity(256);
    for (at, name) in arguments.split(|b| *b == b'\n').enumerate() {
        if at >= MAX_PROPERTIES {
            return Err(Status::BadArgument);
        }
        let value = if hidden.contains_property(name) { None } else { env.property(name) };
        match value {
            Some(value) => {
                let len = u32::try_from(value.len()).map_err(|_| Status::InternalFailure)?;
                out.extend_from_slice(&len.to_le_bytes());
                out.extend_from_slice(&value);
            }
            None => out.extend_from_slice(&u32::MAX.to_le_bytes()),
        }
    }
    Ok(out)
}

/// Writes the properties in `arguments`: name and value, name and value. Returns how many there were, as text. Nothing is
/// written if they cannot be told apart.
pub fn write(env: &mut dyn StreamEnv, arguments: &[u8]) -> Result<Vec<u8>, Status> {
    let mut writes = Vec::with_capacity(8);
    let mut rest = arguments;
    while !rest.is_empty() {
        let name = text(&mut rest).ok_or(Status::BadArgument)?;
        let value = text(&mut rest).ok_or(Status::BadArgument)?;
        if writes.len() >= MAX_PROPERTIES {
            return Err(Status::BadArgument);
        }
        writes.push((name, value));
    }
    for (name, value) in &writes {
        env.set_property(name, value)?;
    }
    Ok(writes.len().to_string().into_bytes())
}

fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, behind) = rest.split_first_chunk::<4>()?;
    let (text, behind) = behind.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    *rest = behind;
    Some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use turnstile_plugins::HttpEnv;

    fn texts(list: &[&[u8]]) -> Vec<u8> {
        list.iter().flat_map(|text| [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat()).collect()
    }

    #[test]
    fn what_is_written_together_is_read_together() {
        let mut env = HttpEnv::default();
        let taken = write(&mut env, &texts(&[b"a.b", b"one\ntwo", b"c", b""])).unwrap();
        assert_eq!(taken, b"2");
        let absent = u32::MAX.to_le_bytes();
        let expected = [&texts(&[b"", b"one\ntwo"])[..], &absent].concat();
        assert_eq!(read(&mut env, b"c\na.b\nd", SecretHeaders::ALL).unwrap(), expected);
        assert_eq!(read(&mut env, b"", SecretHeaders::ALL).unwrap(), absent);
        assert_eq!(write(&mut env, b"").unwrap(), b"0");
    }

    #[test]
    fn what_cannot_be_told_apart_is_not_written() {
        let mut env = HttpEnv::default();
        let whole = texts(&[b"a", b"1", b"b", b"2"]);
        for cut in 1..whole.len() {
            let written = write(&mut env, &whole[..cut]);
            // A cut between two properties leaves fewer of them, and those are whole.
            assert_eq!(written.is_ok(), cut == whole.len() / 2, "{cut}");
        }
        let mut env = HttpEnv::default();
        let far = [&u32::MAX.to_le_bytes()[..], b"a"].concat();
        assert_eq!(write(&mut env, &[&whole[..], &far].concat()), Err(Status::BadArgument));
        assert!(env.properties.is_empty());
    }

    #[test]
    fn a_call_has_so_many_properties_at_most() {
        let mut env = HttpEnv::default();
        let names = |count: usize| vec!["a"; count].join("\n").into_bytes();
        assert!(read(&mut env, &names(MAX_PROPERTIES), SecretHeaders::ALL).is_ok());
        assert_eq!(read(&mut env, &names(MAX_PROPERTIES + 1), SecretHeaders::ALL), Err(Status::BadArgument));
        let pairs = |count: usize| texts(&vec![&b"a"[..]; 2 * count]);
        assert!(write(&mut env, &pairs(MAX_PROPERTIES)).is_ok());
        assert_eq!(write(&mut env, &pairs(MAX_PROPERTIES + 1)), Err(Status::BadArgument));
    }
}
