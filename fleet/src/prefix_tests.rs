#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::body::scan;
use crate::hints::SessionControl;
use crate::identity::{IdentityOptions, identify};

fn options(block_bytes: usize) -> PrefixOptions {
    PrefixOptions::new(block_bytes, 1000, 11)
}

fn hashes_with(route: Route, body: &str, session: Option<&str>, options: &PrefixOptions) -> PrefixHashes {
    let members = scan(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
    let control = SessionControl { session_id: session.map(String::from), ..SessionControl::default() };
    let identity = identify(route, &http::HeaderMap::new(), &members, &control, &IdentityOptions::new(7));
    let named = |key| members.raw(key).filter(|raw| *raw != b"null" && *raw != b"\"\"");
    let namespaces = Namespaces { cache_salt: named("cache_salt"), extra_key: named("extra_key") };
    hash(route, &members, &identity, namespaces, options)
}

fn hashes(route: Route, body: &str) -> PrefixHashes {
    hashes_with(route, body, None, &options(64))
}

fn message(role: &str, n: usize) -> String {
    format!("{{\"role\":\"{role}\",\"content\":\"{}\"}}", format!("{role} {n} ").repeat(20))
}

fn chat(count: usize) -> String {
    let list: Vec<String> = (0..count).map(|n| message(if n % 2 == 0 { "user" } else { "assistant" }, n)).collect();
    format!("{{\"model\":\"m\",\"messages\":[{}]}}", list.join(","))
}

#[test]
fn an_appended_message_keeps_every_earlier_block() {
    let (short, long) = (hashes(Route::Chat, &chat(3)), hashes(Route::Chat, &chat(4)));
    assert!(short.blocks.len() > 5 && long.blocks.len() > short.blocks.len());
    assert_eq!(long.blocks[..short.blocks.len()], short.blocks[..]);
    let spaced = chat(3).replace("}]", "} \n ]");
    assert_eq!(hashes(Route::Chat, &spaced).blocks, short.blocks);
}

#[test]
fn a_changed_message_changes_its_block_and_all_behind_it() {
    let whole = hashes(Route::Chat, &chat(4)).blocks;
    let changed = hashes(Route::Chat, &chat(4).replacen("assistant 1", "assistant 9", 1)).blocks;
    let shared = whole.iter().zip(&changed).take_while(|(a, b)| a == b).count();
    assert!(shared >= 3, "{shared}");
    assert!(whole[shared..].iter().zip(&changed[shared..]).all(|(a, b)| a != b));
}

#[test]
fn the_order_of_members_does_not_matter() {
    let messages = format!("[{}]", message("user", 1));
    let one =
        format!("{{\"model\":\"m\",\"tools\":[1],\"messages\":{messages},\"cache_salt\":\"s\",\"temperature\":1}}");
    let two = format!("{{\"cache_salt\":\"s\",\"messages\":{messages},\"stream\":true,\"tools\":[1],\"model\":\"m\"}}");
    assert_eq!(hashes(Route::Chat, &one), hashes(Route::Chat, &two));
}

#[test]
fn model_salt_adapter_and_tools_separate_prompts_from_the_first_block() {
    let body = |extra: &str| format!("{{{extra}\"messages\":[{}]}}", message("user", 1));
    let variants = [
        "",
        "\"model\":\"m\",",
        "\"model\":\"n\",",
        "\"cache_salt\":\"s\",",
        "\"extra_key\":\"s\",",
        "\"lora_path\":\"s\",",
        "\"tools\":[1],",
    ];
    let mut firsts: Vec<u64> = variants.iter().map(|extra| hashes(Route::Chat, &body(extra)).blocks[0]).collect();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts.len(), variants.len());
    assert_eq!(hashes(Route::Chat, &body("\"cache_salt\":\"\",")), hashes(Route::Chat, &body("\"cache_salt\":null,")));
    assert_eq!(hashes(Route::Chat, &body("\"cache_salt\":\"\",")), hashes(Route::Chat, &body("")));
}

#[test]
fn every_route_hashes_what_it_renders() {
    let long = "x".repeat(300);
    for (route, body) in [
        (Route::Completions, format!("{{\"prompt\":\"{long}\"}}")),
        (Route::Generate, format!("{{\"text\":\"{long}\"}}")),
        (Route::Generate, format!("{{\"input_ids\":[{}]}}", vec!["100"; 100].join(","))),
        (Route::Chat, format!("{{\"messages\":[],\"input_ids\":[{}]}}", vec!["100"; 100].join(","))),
        (Route::Responses, format!("{{\"input\":\"{long}\"}}")),
        (Route::Responses, format!("{{\"instructions\":\"{long}\"}}")),
        (Route::Messages, format!("{{\"system\":\"{long}\",\"messages\":[]}}")),
    ] {
        let found = hashes(route, &body);
        assert!(found.blocks.len() >= 4 && found.bytes >= 300, "{route} {body}: {found:?}");
    }
    assert!(hashes(Route::Embeddings, &format!("{{\"input\":\"{long}\"}}")).blocks.is_empty());
}

#[test]
fn a_longer_text_prompt_continues_a_shorter_one() {
    let body = |n: usize| format!("{{\"text\":\"{}\"}}", "word ".repeat(n));
    let (short, long) = (hashes(Route::Generate, &body(50)), hashes(Route::Generate, &body(90)));
    assert_eq!(long.blocks[..short.blocks.len()], short.blocks[..]);
}

#[test]
fn ties_go_by_session_then_by_first_block_then_by_the_short_prompt() {
    let affinity = |n: usize, session| hashes_with(Route::Chat, &chat(n), session, &options(64)).affinity_hash;
    assert_eq!(affinity(3, Some("s")), affinity(5, Some("s")));
    assert_ne!(affinity(3, Some("s")), affinity(3, Some("t")));
    assert_eq!(affinity(3, None), hashes(Route::Chat, &chat(3)).blocks[0]);
    assert_eq!(affinity(3, None), affinity(5, None));
    let short = |text: &str| hashes(Route::Completions, &format!("{{\"prompt\":\"{text}\"}}")).affinity_hash;
    assert_ne!(short("a"), short("b"));
    assert_eq!(short("a"), short("a"));
}

#[test]
fn the_number_of_blocks_is_bounded() {
    let few = hashes_with(Route::Chat, &chat(20), None, &PrefixOptions::new(64, 5, 11));
    assert_eq!(few.blocks.len(), 5);
    assert_eq!(few.blocks[..], hashes(Route::Chat, &chat(20)).blocks[..5]);
    assert!(few.bytes > 1000);
}

#[test]
fn another_seed_gives_other_hashes() {
    let other = hashes_with(Route::Chat, &chat(3), None, &PrefixOptions::new(64, 1000, 12));
    assert!(other.blocks.iter().zip(&hashes(Route::Chat, &chat(3)).blocks).all(|(a, b)| a != b));
}

proptest! {
    /// Blocks hashed in place and blocks gathered over parts are those of the one stream.
    #[test]
    fn blocks_do_not_depend_on_how_the_stream_is_fed(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8)) {
        let options = options(64);
        let mut chain = Chain::new(&options);
        for part in &parts {
            chain.feed(part);
        }
        let mut previous = options.seed;
        let expected: Vec<u64> = parts
            .concat()
            .chunks_exact(64)
            .map(|block| {
                previous = link(previous, xxh3_64_with_secret(block, &options.secret), options.seed);
                previous
            })
            .collect();
        prop_assert_eq!(chain.finish(), expected);
    }

    #[test]
    fn prompts_share_as_many_blocks_as_their_bytes_agree(
        text in "[a-z ]{400,600}", at in 0_usize..400, block in prop::sample::select(vec![64_usize, 100, 128]),
    ) {
        let body = |text: &str| format!("{{\"prompt\":\"{text}\"}}");
        let mut other = text.clone().into_bytes();
        other[at] = b'#';
        let other = String::from_utf8(other).unwrap();
        let options = options(block);
        let one = hashes_with(Route::Completions, &body(&text), None, &options).blocks;
        let two = hashes_with(Route::Completions, &body(&other), None, &options).blocks;
        let shared = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
        // Before the text stand the tags of five parts (two bytes each) and its opening quote.
        prop_assert_eq!(shared, (at + 5 * 2 + 1) / block);
    }
}

#[test]
fn what_workers_report_is_told_in_blocks_and_bytes() {
    let prefix = PrefixHashes { block_bytes: 512, bytes: 4096, ..PrefixHashes::default() };
    assert_eq!(prefix.tokens_of(3, 4.0), 384);
    // A block of which part was cached may be there.
    assert_eq!(prefix.blocks_of(384, 1024), Some(3));
    assert_eq!(prefix.blocks_of(385, 1024), Some(4));
    assert_eq!(prefix.blocks_of(1, 0), None);
    assert_eq!(PrefixHashes::default().blocks_of(1, 1), None);

    let mut ratio = BytesPerToken::new(4.0);
    ratio.learn(1_000, 31);
    assert_eq!(ratio.get(), 4.0, "a tiny prompt teaches nothing");
    ratio.learn(800, 100);
    assert_eq!(ratio.get(), 4.2);
    for _ in 0..1_000 {
        ratio.learn(1_000_000, 32);
    }
    assert!((ratio.get() - 64.0).abs() < 1e-6, "a silly sample is bounded");
}
