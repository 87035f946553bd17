#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::*;

const SAMPLES: [&str; 7] = [
    "The capital city of France is Paris.",
    "fn main() {\n    println!(\"hi\");\n}\n",
    "  two  spaces\tand a tab ",
    "Grüße, 世界 🎉!",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    "{\"a\": 1, \"b\": [true, null]}",
];

#[test]
fn text_comes_back_unchanged() {
    for text in SAMPLES {
        assert_eq!(decode(&encode(text)), text);
    }
}

#[test]
fn a_prefix_of_the_tokens_is_the_tokens_of_the_prefix_text() {
    for text in SAMPLES.iter().filter(|text| text.is_ascii()) {
        let ids = encode(text);
        for cut in 0..ids.len() {
            assert_eq!(encode(&decode(&ids[..cut])), ids[..cut], "{text:?} cut at {cut}");
        }
    }
}

#[test]
fn a_marker_is_one_token_and_ends_a_piece() {
    let ids = encode("a<|im_end|>b");
    assert_eq!(ids, [u32::from(b'a'), Special::ImEnd.id(), u32::from(b'b')]);
}

#[test]
fn an_id_without_text_is_a_replacement_character() {
    assert_eq!(decode(&[300, u32::MAX]), "\u{fffd}\u{fffd}");
}

#[test]
fn a_streamed_character_is_held_until_it_is_complete() {
    let mut decoder = Decoder::default();
    let parts: Vec<String> = encode("é!").into_iter().map(|id| decoder.push(id)).collect();
    assert_eq!(parts, ["", "é", "!"]);
}

#[test]
fn prose_takes_about_a_token_for_three_and_a_half_characters() {
    let text = SAMPLES[0];
    assert!((9..=13).contains(&encode(text).len()), "{}", encode(text).len());
}
