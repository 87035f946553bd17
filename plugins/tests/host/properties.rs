//! Properties and foreign functions.

use std::borrow::Cow;

use turnstile_plugins::{HttpEnv, Lent, Status, StreamEnv};

use crate::rig::{Guest, Rig, request, text};

const NAMES: &str = r#"
(data (i32.const 100) "turnstile\00request\00model\00")  ;; 24 with the last NUL
(data (i32.const 130) "turnstile.request.model")         ;; 23
(data (i32.const 160) "route.target")                    ;; 12
(data (i32.const 180) "w1")
(data (i32.const 190) "plugin_name")                     ;; 11
(data (i32.const 210) "plugin_root_id")                  ;; 14
(data (i32.const 230) "plugin_vm_id")                    ;; 12
(data (i32.const 250) "asked_by")                        ;; 8
(data (i32.const 260) "nobody")                          ;; 6
"#;

fn guest(body: &str) -> Guest {
    Guest::on_request_headers(body).also(NAMES)
}

fn get(path: u32, len: u32) -> String {
    format!(
        "(call $put (call $get_property (i32.const {path}) (i32.const {len}) (i32.const 0) (i32.const 4)))
         (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))"
    )
}

#[test]
fn paths_reach_the_environment_as_the_guest_wrote_them() {
    for (path, len) in [(100, 23), (100, 24)] {
        let rig = guest(&get(path, len)).start();
        let mut env = request();
        env.properties.insert(b"turnstile\0request\0model".to_vec(), b"by NUL".to_vec());
        env.properties.insert(b"turnstile.request.model".to_vec(), b"by dot".to_vec());
        assert_eq!(rig.results(&mut env), [0]);
        assert_eq!(text(&env), "by NUL", "one trailing NUL is dropped");
    }
    let rig = guest(&get(130, 23)).start();
    let mut env = request();
    env.properties.insert(b"turnstile.request.model".to_vec(), b"by dot".to_vec());
    rig.results(&mut env);
    assert_eq!(text(&env), "by dot");
}

#[test]
fn what_is_written_can_be_read_and_belongs_to_the_stream() {
    let rig = guest(&format!(
        "{} (call $put (call $set_property (i32.const 160) (i32.const 12) (i32.const 180) (i32.const 2))) {}",
        "(call $put (call $get_property (i32.const 160) (i32.const 12) (i32.const 0) (i32.const 4)))",
        get(160, 12)
    ))
    .start();
    for _ in 0..2 {
        let mut env = request();
        assert_eq!(rig.results(&mut env), [1, 0, 0], "absent at first in every stream");
        assert_eq!(env.properties.get(b"route.target".as_slice()).unwrap(), b"w1");
        assert_eq!(text(&env), "w1");
    }
}

#[test]
fn a_plugin_can_learn_its_names() {
    let mut spec = guest("").spec();
    spec.root_id = "root".to_owned();
    spec.vm_id = "vm".to_owned();
    for (path, len, expected) in [(190, 11, "guest"), (210, 14, "root"), (230, 12, "vm"), (250, 8, "guest")] {
        spec.wasm = guest(&get(path, len)).wasm().into();
        let rig = Rig::start(spec.clone()).unwrap();
        let mut env = request();
        assert_eq!(rig.results(&mut env), [0]);
        assert_eq!(text(&env), expected);
    }
    spec.root_id.clear();
    spec.wasm = guest(&get(210, 14)).wasm().into();
    let mut env = request();
    assert_eq!(Rig::start(spec).unwrap().results(&mut env), [0], "an empty root id is there");
    assert_eq!(text(&env), "");
    let rig =
        guest("(call $put (call $get_property (i32.const 260) (i32.const 6) (i32.const 0) (i32.const 4)))").start();
    assert_eq!(rig.results_of_request(), [1]);
}

/// Refuses every write; knows one function, `up`.
struct Strict(HttpEnv);

impl StreamEnv for Strict {
    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        if path == b"results" || path == b"text" {
            return self.0.set_property(path, value);
        }
        Err(Status::BadArgument)
    }

    fn call_foreign(&mut self, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        match name {
            "up" => Ok(Cow::Owned(arguments.to_ascii_uppercase())),
            "broken" => Err(Status::InternalFailure),
            _ => Err(Status::NotFound),
        }
    }
}

fn run(spec: turnstile_plugins::PluginSpec) -> (Rig, HttpEnv) {
    let rig = Rig::start(spec).unwrap();
    let mut env = Lent::new(Strict(HttpEnv::default()));
    rig.stream().on_request_headers(&mut env, true).unwrap();
    (rig, env.into_inner().0)
}

#[test]
fn a_refused_write_is_ok_for_a_lenient_plugin_and_counted() {
    let guest = guest("(call $put (call $set_property (i32.const 160) (i32.const 12) (i32.const 180) (i32.const 2)))");
    let (rig, env) = run(guest.spec());
    assert_eq!(crate::rig::results(&env), [0]);
    assert_eq!(rig.plugin.stats().tolerated, 1);
    assert!(rig.lines()[0].contains("route.target"));
    let mut spec = guest.spec();
    spec.lenient = false;
    assert_eq!(crate::rig::results(&run(spec).1), [2]);
}

#[test]
fn foreign_functions_answer_or_are_not_found_and_null_addresses_want_no_answer() {
    let guest = Guest::on_request_headers(
        r#"(call $put (call $foreign (i32.const 100) (i32.const 2) (i32.const 110) (i32.const 3) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))
           (call $put (call $foreign (i32.const 100) (i32.const 2) (i32.const 110) (i32.const 3) (i32.const 8) (i32.const 12)))
           (call $text (i32.load (i32.const 8)) (i32.load (i32.const 12)))
           (call $put (call $foreign (i32.const 100) (i32.const 2) (i32.const 110) (i32.const 3) (i32.const 0) (i32.const 0)))
           (call $put (call $foreign (i32.const 110) (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 8) (i32.const 12)))
           (call $put (call $foreign (i32.const 120) (i32.const 6) (i32.const 0) (i32.const 0) (i32.const 8) (i32.const 12)))"#,
    )
    .also(r#"(data (i32.const 100) "up") (data (i32.const 110) "abc") (data (i32.const 120) "broken")"#);
    let (_, env) = run(guest.spec());
    assert_eq!(crate::rig::results(&env), [0, 3, 0, 0, 1, 10]);
    assert_eq!(text(&env), "ABC");
}

#[test]
fn the_gateway_can_call_a_function_of_the_guest() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_foreign_function") (param $c i32) (param $f i32) (param $n i32)
             (call $put (local.get $f)) (call $put (local.get $n))
             (call $put (call $get_buffer (i32.const 8) (i32.const 0) (i32.const 99) (i32.const 0) (i32.const 4)))
             (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))
             (call $flush))"#,
    )
    .start();
    let mut env = request();
    rig.stream().on_foreign_function(&mut env, 42, "again".into()).unwrap();
    assert_eq!(crate::rig::results(&env), [42, 5, 0]);
    assert_eq!(text(&env), "again");
}
