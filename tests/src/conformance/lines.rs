//! Lines that guests of the kit log. They begin with `> `, so that they can be told from what a host says about a guest.

/// A guest's line without its mark; nothing for a line of the host's.
pub fn guest_line(line: &str) -> Option<&str> {
    line.strip_prefix("> ")
}

/// The line as tests write it: with the plugin's name where there are several.
pub fn named(plugin: &str, line: &str, names: bool) -> String {
    if names { format!("{plugin}: {line}") } else { line.to_owned() }
}
