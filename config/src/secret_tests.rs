#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use crate::{Config, Secret, SecretError};

const VALUE: &str = "hunter2-hunter2";

#[test]
fn a_secret_is_read_from_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, format!("{VALUE}\r\n")).unwrap();
    assert_eq!(Secret::file(&path).resolve().unwrap(), VALUE);
    assert_eq!(Secret::literal(VALUE).resolve().unwrap(), VALUE);
    assert_eq!(Secret::env("PATH").resolve().unwrap(), std::env::var("PATH").unwrap());
}

#[test]
fn what_cannot_be_a_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        Secret::file(path).resolve().unwrap_err()
    };
    assert!(matches!(write("empty", b" \n"), SecretError::Unusable));
    assert!(matches!(write("lines", b"a\nb"), SecretError::Unusable));
    assert!(matches!(write("large", &vec![b'a'; 70_000]), SecretError::FileTooLarge(_)));
    assert!(matches!(write("binary", b"\xff"), SecretError::File { .. }));
    assert!(matches!(Secret::file(dir.path().join("none")).resolve(), Err(SecretError::File { .. })));
    for name in ["TURNSTILE_TEST_NO_SUCH_VARIABLE", "", "A=B", "\0"] {
        assert!(matches!(Secret::env(name).resolve(), Err(SecretError::EnvNotSet(_))), "{name:?}");
    }
}

#[test]
fn unreadable_secrets_have_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[admin]\ntoken = { env = \"TURNSTILE_TEST_NO_SUCH_VARIABLE\" }\n[[pools]]\napi_key = { file = \"none\" }\n\
                workers = [{ url = \"http://a:1\", api_key = \"a\\nb\" }, { url = \"http://b:1\", api_key = {} }, \
                { url = \"http://c:1\", api_key = { env = \"A\", file = \"b\" } }, { url = \"http://d:1\", api_key = { evn = \"A\" } }]\n";
    let problems: Vec<_> =
        Config::parse(text, "t.toml", dir.path()).unwrap_err().problems.iter().map(ToString::to_string).collect();
    let path = dir.path().join("none");
    let missing = std::fs::metadata(&path).unwrap_err();
    assert_eq!(
        problems,
        [
            "2:9: admin.token: the environment variable TURNSTILE_TEST_NO_SUCH_VARIABLE is not set".to_owned(),
            format!("4:11: pools[0].api_key: cannot read {}: {missing}", path.display()),
            "5:44: pools[0].workers[0].api_key: the secret is empty or holds control characters".to_owned(),
            "5:86: pools[0].workers[1].api_key: expected exactly 1 of its keys, found 0".to_owned(),
            "5:124: pools[0].workers[2].api_key: expected exactly 1 of its keys, found 2".to_owned(),
            "5:187: pools[0].workers[3].api_key.evn: unknown key, did you mean `env`?".to_owned(),
        ]
    );
}

#[test]
fn the_value_is_never_shown() {
    let text = format!(
        "[admin]\naddress = \"0.0.0.0:9180\"\ntoken = \"{VALUE}\"\n[[pools]]\napi_key = \"{VALUE}\"\n\
         workers = [{{ url = \"http://a:1\", api_key = \"{VALUE}\" }}]\n"
    );
    let config = Config::parse(&text, "t.toml", Path::new(".")).unwrap();
    let shown = [
        format!("{config:?} {config:#?}"),
        serde_json::to_string(&config).unwrap(),
        config.summary(),
        format!("{:?}", crate::restart_needed(&config, &Config::default())),
    ];
    for text in shown {
        assert!(!text.contains(VALUE), "{text}");
    }
    assert!(serde_json::to_string(&config).unwrap().contains("***"));
}

#[test]
fn errors_never_show_the_value() {
    let wrong = [
        format!("admin.token = \"{VALUE}"),
        format!("admin.token = {VALUE}"),
        format!("admin.token = [\"{VALUE}\"]"),
        format!("admin.token = {{ value = \"{VALUE}\" }}"),
        format!("admin.token = {{ env = \"A\", file = \"b\", value = \"{VALUE}\" }}"),
        format!("admin.token = \"{VALUE}\\u0000\""),
        format!("admin.tokn = \"{VALUE}\""),
        format!(
            "[[pools]]\nworkers = [\"http://me:{VALUE}@a:1\", {{ url = \"{VALUE}\" }}]\napi_key = \"{VALUE}\"\nx = 1"
        ),
        format!("[[pools]]\nworkers = [{{ url = \"http://a:1\", api_key = [\"{VALUE}\"] }}]"),
    ];
    for text in wrong {
        let errors = Config::parse(&text, "t.toml", Path::new(".")).unwrap_err();
        let shown = format!("{errors} {errors:?} {}", serde_json::to_string(&errors).unwrap());
        assert!(!shown.contains(VALUE), "{text}: {shown}");
    }
}

#[test]
fn the_place_of_a_secret_is_shown() {
    let places = [Secret::env("KEY"), Secret::file("dir/key")];
    assert_eq!(serde_json::to_string(&places).unwrap(), r#"[{"env":"KEY"},{"file":"dir/key"}]"#);
    assert_eq!(format!("{places:?}"), r#"[{ env = "KEY" }, { file = "dir/key" }]"#);
}
