use super::matches;

#[test]
fn stars_and_lists_stand_for_texts() {
    for (pattern, text) in [
        ("a", "a"),
        ("a*c", "abc"),
        ("a*c", "ac"),
        ("*b*", "abc"),
        ("= {OK,NOT_FOUND}", "= NOT_FOUND"),
        ("{a,b}{c,d}", "bc"),
        ("{\"a\":1,\"b\":2}", "{\"a\":1,\"b\":2}"),
        ("a{b", "a{b"),
        ("*a", "aaba"),
    ] {
        assert!(matches(pattern, text), "{pattern} {text}");
    }
    for (pattern, text) in [("a", "ab"), ("a*c", "ab"), ("{a,b}", "c"), ("", "a"), ("a*b*c", "acb")] {
        assert!(!matches(pattern, text), "{pattern} {text}");
    }
}
