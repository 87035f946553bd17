//! The turnstile binary.
fn main() {}
