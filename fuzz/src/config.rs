//! The configuration file.

use std::path::Path;

use turnstile_config::Config;

/// A text is a configuration that survives being written out and read again, or it is refused with the places of what is
/// wrong. The input is the file.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // Nothing is there, so relative paths lead nowhere.
    let nowhere = Path::new("/nonexistent/turnstile");
    match Config::parse(text, "fuzz.toml", nowhere) {
        Err(errors) => {
            assert!(!errors.problems.is_empty());
            let lines = text.lines().count().max(1);
            for problem in &errors.problems {
                assert!(!problem.message.is_empty());
                assert!(problem.line > 0 || !problem.key.is_empty(), "no place: {problem}");
                assert!(problem.line <= lines + 1, "line {} of {lines}: {problem}", problem.line);
            }
            assert!(errors.to_string().starts_with("fuzz.toml:"));
        }
        Ok(config) => {
            let written = toml::to_string(&config).expect("a configuration can be written");
            let again = match Config::parse(&written, "written.toml", nowhere) {
                Ok(again) => again,
                Err(errors) => panic!("{errors}\n{written}"),
            };
            // A literal secret is not written out.
            if !written.contains("***") {
                assert_eq!(again, config);
            }
            assert_eq!(toml::to_string(&again).expect("a configuration can be written"), written);
        }
    }
}
