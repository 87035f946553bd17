//! Asking the admin listener of a running gateway, from the command line.

use crate::cli::AdminArgs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The longest that an answer may take beyond what was asked for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sends one request; the body of a 200. `wait`: how long the gateway was asked to wait before it answers.
///
/// # Errors
/// What went wrong, for the terminal.
pub fn ask(admin: &AdminArgs, method: &str, path: &str, body: &str, wait: Duration) -> Result<String, String> {
    let address = &admin.admin;
    let authorization = admin.token.as_ref().map(|t| format!("authorization: Bearer {t}\r\n")).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n{authorization}content-length: {}\r\n\r\n",
        body.len()
    );
    let fail = |e: std::io::Error| format!("{address}: {e}");
    let mut stream = TcpStream::connect(address).map_err(fail)?;
    stream.set_read_timeout(Some(wait + PATIENCE)).map_err(fail)?;
    stream.write_all(request.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).map_err(fail)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(fail)?;
    let (head, text) = answer.split_once("\r\n\r\n").ok_or_else(|| format!("{address}: not an HTTP answer"))?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    if status == "200" { Ok(text.to_owned()) } else { Err(format!("{address} answered {status}: {}", text.trim())) }
}
