//! Redis commands as guests hand them over: one array of bulk strings in RESP, and nothing else.
//!
//! Connections are shared by all calls of a plugin, so a command must have exactly one reply and leave its connection as it
//! was.

use bytes::Bytes;

/// Most words of one command.
const MAX_WORDS: usize = 1 << 16;

/// Commands that change what the connection is, or whose replies do not come one for one.
const REFUSED: [&str; 25] = [
    "AUTH",
    "HELLO",
    "SELECT",
    "QUIT",
    "RESET",
    "CLIENT",
    "MULTI",
    "EXEC",
    "DISCARD",
    "WATCH",
    "UNWATCH",
    "SUBSCRIBE",
    "PSUBSCRIBE",
    "SSUBSCRIBE",
    "UNSUBSCRIBE",
    "PUNSUBSCRIBE",
    "SUNSUBSCRIBE",
    "MONITOR",
    "SYNC",
    "PSYNC",
    "READONLY",
    "READWRITE",
    "ASKING",
    "REPLCONF",
    "SHUTDOWN",
];

/// Why bytes are no command that can be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotACommand {
    /// The form.
    #[error("not one array of bulk strings in RESP")]
    Form,
    /// Too long.
    #[error("more than {MAX_WORDS} words")]
    TooLong,
    /// A name that no command has. Redis compares names only up to a NUL.
    #[error("a name with other than printable ASCII characters")]
    Name,
    /// A command that the connection's other users would suffer from.
    #[error("{0} changes the connection, which calls share")]
    Refused(&'static str),
}

/// The words of one command.
///
/// # Errors
/// [`NotACommand`].
pub(crate) fn parse(query: &[u8]) -> Result<Vec<Bytes>, NotACommand> {
    let (count, mut rest) = number(query, b'*')?;
    if count == 0 {
        return Err(NotACommand::Form);
    }
    if count > MAX_WORDS {
        return Err(NotACommand::TooLong);
    }
    // What is there bounds what is made room for: each word takes five bytes at least.
    let mut words = Vec::with_capacity(count.min(rest.len() / 5));
    for _ in 0..count {
        let (len, after) = number(rest, b'$')?;
        let (word, after) = after.split_at_checked(len).ok_or(NotACommand::Form)?;
        rest = after.strip_prefix(b"\r\n").ok_or(NotACommand::Form)?;
        words.push(Bytes::copy_from_slice(word));
    }
    if !rest.is_empty() {
        return Err(NotACommand::Form);
    }
    let name = words.first().map_or(&[][..], |word| word.as_ref());
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err(NotACommand::Name);
    }
    let second = words.get(1).map_or(&[][..], |word| word.as_ref());
    if name.eq_ignore_ascii_case(b"SCRIPT") && second.eq_ignore_ascii_case(b"DEBUG") {
        return Err(NotACommand::Refused("SCRIPT DEBUG"));
    }
    match REFUSED.into_iter().find(|refused| name.eq_ignore_ascii_case(refused.as_bytes())) {
        Some(refused) => Err(NotACommand::Refused(refused)),
        None => Ok(words),
    }
}

/// The number behind a mark, and what follows its line.
fn number(bytes: &[u8], mark: u8) -> Result<(usize, &[u8]), NotACommand> {
    let rest = bytes.strip_prefix(&[mark]).ok_or(NotACommand::Form)?;
    // No length that fits a 32-bit memory has more digits.
    let end = rest.iter().take(11).position(|b| *b == b'\r').ok_or(NotACommand::Form)?;
    let (digits, rest) = rest.split_at(end);
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(digits).ok().filter(|_| is_number).and_then(|text| text.parse().ok());
    let rest = rest.strip_prefix(b"\r\n").ok_or(NotACommand::Form)?;
    Ok((number.ok_or(NotACommand::Form)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_is_read_word_by_word() {
        let words = parse(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n");
        assert_eq!(words, Ok(vec![Bytes::from("SET"), Bytes::from("k"), Bytes::from("a\r\nb")]));
        assert_eq!(parse(b"*1\r\n$0\r\n\r\n"), Ok(vec![Bytes::new()]));
    }

    #[test]
    fn anything_else_is_refused() {
        for bad in [
            &b""[..],
            b"PING\r\n",
            b"*0\r\n",
            b"*-1\r\n",
            b"*1\r\n",
            b"*1\r\n$4\r\nPIN",
            b"*1\r\n$4\r\nPINGxx",
            b"*1\r\n+PING\r\n",
            b"*1\r\n*1\r\n$4\r\nPING\r\n",
            b"*1\r\n$99999999999999999999\r\n",
            b"*1\r\n$+4\r\nPING\r\n",
            // Two commands have two replies.
            b"*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nPING\r\n",
        ] {
            assert_eq!(parse(bad), Err(NotACommand::Form), "{bad:?}");
        }
        assert_eq!(parse(b"*65537\r\n"), Err(NotACommand::TooLong));
    }

    #[test]
    fn commands_that_change_the_connection_are_refused_in_any_case() {
        assert_eq!(parse(b"*2\r\n$6\r\nselect\r\n$1\r\n1\r\n"), Err(NotACommand::Refused("SELECT")));
        assert_eq!(parse(b"*1\r\n$9\r\nSUBSCRIBE\r\n"), Err(NotACommand::Refused("SUBSCRIBE")));
        let debug = parse(b"*3\r\n$6\r\nscript\r\n$5\r\nDebug\r\n$3\r\nYES\r\n");
        assert_eq!(debug, Err(NotACommand::Refused("SCRIPT DEBUG")));
        assert!(parse(b"*2\r\n$6\r\nSCRIPT\r\n$5\r\nFLUSH\r\n").is_ok());
    }

    #[test]
    fn a_name_is_printable() {
        for name in ["SELECT\0a", "SEL ECT", "SELECT\n", "S\u{e9}LECT"] {
            let query = format!("*2\r\n${}\r\n{name}\r\n$1\r\n1\r\n", name.len());
            assert_eq!(parse(query.as_bytes()), Err(NotACommand::Name), "{name:?}");
        }
    }
}
