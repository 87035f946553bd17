//! What a module of any SDK is started with: its configuration as text, its root id, and imports that there are not.

use crate::reload::reload;
use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Guest, PluginText, Request, Rig, Setup, built_in, chat};

/// A filter that answers a request whose header `x-do` has its plugin's first letter: its root id, `|` and its configuration,
/// as it is handed them, with the status 200 and what `envoy_resolve_dns` answers.
fn telling() -> Guest {
    Guest::on_request(
        r#"(if (call $told)
             (then
               (drop (call $get_property (i32.const 100) (i32.const 14) (i32.const 2000) (i32.const 2004)))
               (local.set $n (i32.load (i32.const 2004)))
               (memory.copy (i32.const 8192) (i32.load (i32.const 2000)) (local.get $n))
               (i32.store8 (i32.add (i32.const 8192) (local.get $n)) (i32.const 124))
               (local.set $n (i32.add (local.get $n) (i32.const 1)))
               (i32.store (i32.const 2004) (i32.const 0))
               (drop (call $get_buffer (i32.const 7) (i32.const 0) (i32.const 4096) (i32.const 2000) (i32.const 2004)))
               (memory.copy
                 (i32.add (i32.const 8192) (local.get $n)) (i32.load (i32.const 2000)) (i32.load (i32.const 2004)))
               (local.set $n (i32.add (local.get $n) (i32.load (i32.const 2004))))
               (drop (call $respond
                 (i32.add (i32.const 200) (call $resolve (i32.const 100) (i32.const 14) (i32.const 2000)))
                 (i32.const 0) (i32.const 0) (i32.const 8192) (local.get $n) (i32.const 0) (i32.const 0)
                 (i32.const -1)))
               (return (i32.const 1))))"#,
    )
    .import(r#"(import "env" "envoy_resolve_dns" (func $resolve (param i32 i32 i32) (result i32)))"#)
    .data(100, b"plugin_root_id")
}

fn chain(entries: &[(&str, &str)]) -> Vec<PluginText> {
    let entry = |(name, keys): &(&str, &str)| PluginText::new(name, "telling.wasm", "filter").key(*keys);
    entries.iter().map(entry).chain(built_in()).collect()
}

/// What the plugin answers.
async fn told(rig: &Rig, plugin: &str) -> Vec<u8> {
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-do", plugin)).await;
    assert_eq!(answer.status, 212, "the unknown import answers 12, UNIMPLEMENTED");
    answer.body.to_vec()
}

/// What the admin listener shows of it.
async fn shown(rig: &Rig, plugin: &str) -> Value {
    let plugins = rig.admin("/plugins").await.json();
    plugins["plugins"].as_array().unwrap().iter().find(|shown| shown["name"] == plugin).unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_is_started_with_the_text_root_id_and_stubs_of_its_entry() {
    let stub = "stub_unknown_imports = true";
    let text = r#"config = "mode: fast\r\n\tkey = '\\d+' \u0000 caf\u00e9\n\n""#;
    let handed = "mode: fast\r\n\tkey = '\\d+' \0 caf\u{e9}\n\n";
    let shared = |config: &str| format!("root_id = \"my_root\"\n{config}\n{stub}");
    let [text, list] = [text, "config = [1, { deep = true }]"].map(shared);
    let named = format!("config = {{ a = 1 }}\n{stub}");
    let empty = format!("root_id = \"\"\n{stub}");
    let entries = [("alpha", &*text), ("beta", &*list), ("named", &*named), ("unnamed-root", &*empty)];
    let mut rig = Setup::new().file("telling.wasm", telling().wasm()).plugins(&chain(&entries)).start().await;

    // Two entries of one module with one root id, one with the root id that is the default, one with an empty root id.
    assert_eq!(told(&rig, "alpha").await, format!("my_root|{handed}").as_bytes());
    assert_eq!(told(&rig, "beta").await, br#"my_root|[1,{"deep":true}]"#);
    assert_eq!(told(&rig, "named").await, br#"named|{"a":1}"#);
    assert_eq!(told(&rig, "unnamed-root").await, b"|");
    assert_eq!(shown(&rig, "alpha").await["config"], json!(handed));
    assert_eq!(shown(&rig, "unnamed-root").await["config"], Value::Null);
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200, "all of them let it pass");

    // A change of either starts that plugin anew, and no other.
    let mut start = shown(&rig, "alpha").await["start"].clone();
    let beta = shown(&rig, "beta").await["start"].clone();
    for (at, (keys, expected)) in [
        (text.replace("my_root", "your_root"), format!("your_root|{handed}")),
        (format!("config = \"\"\nroot_id = \"your_root\"\n{stub}"), "your_root|".to_owned()),
    ]
    .into_iter()
    .enumerate()
    {
        let [_, others @ ..] = entries;
        let entries: Vec<_> = std::iter::once(("alpha", &*keys)).chain(others).collect();
        rig.edit(|setup| setup.set_plugins(&chain(&entries)));
        rig.generation(at as u64 + 2).await;
        assert_eq!(told(&rig, "alpha").await, expected.as_bytes());
        let before = std::mem::replace(&mut start, shown(&rig, "alpha").await["start"].clone());
        assert_ne!(start, before, "{keys}");
        assert_eq!(shown(&rig, "beta").await["start"], beta);
    }

    // Without the key the module is refused by the import's name, and what served serves on.
    rig.edit(|setup| setup.set_plugins(&chain(&[("alpha", "")])));
    let refused = reload(&rig).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    for named in ["alpha", "unknown import env.envoy_resolve_dns: func(i32 i32 i32) -> (i32)", "stub_unknown_imports"] {
        assert!(refused.text().contains(named), "{}", refused.text());
    }
    assert_eq!(told(&rig, "alpha").await, b"your_root|");
    // Nor is a running start taken over that has the key.
    rig.edit(|setup| setup.set_plugins(&chain(&[("alpha", "config = \"\"\nroot_id = \"your_root\"")])));
    assert_eq!(reload(&rig).await.status, 400);
}
