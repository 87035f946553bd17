//! The Proxy-Wasm conformance kit: against the host library at once, against the gateway in groups of ten behaviours.

use std::ops::RangeInclusive;
use turnstile_tests::conformance::{Kit, Mode, Selection};

async fn hold(mode: Mode, numbers: RangeInclusive<u16>) {
    let kit = Kit::own().unwrap();
    let selection = Selection { modes: vec![mode], numbers: numbers.collect(), ..Selection::default() };
    let mut failures = String::new();
    let summary = kit
        .run(&selection, |outcome| {
            if outcome.problem.is_some() {
                failures.push_str(&format!("\n{}", outcome.line()));
            }
        })
        .await;
    assert!(summary.passed > 0, "no test ran");
    assert_eq!(summary.failed, 0, "{failures}");
}

#[test]
fn every_behaviour_has_a_test() {
    assert_eq!(Kit::own().unwrap().untested(), Vec::<u16>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_library_conforms() {
    hold(Mode::Host, 1..=108).await;
}

macro_rules! gateway {
    ($($name:ident: $numbers:expr;)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            hold(Mode::Gateway, $numbers).await;
        })*
    };
}

gateway! {
    the_gateway_conforms_001_to_010: 1..=10;
    the_gateway_conforms_011_to_020: 11..=20;
    the_gateway_conforms_021_to_030: 21..=30;
    the_gateway_conforms_031_to_040: 31..=40;
    the_gateway_conforms_041_to_050: 41..=50;
    the_gateway_conforms_051_to_060: 51..=60;
    the_gateway_conforms_061_to_070: 61..=70;
    the_gateway_conforms_071_to_080: 71..=80;
    the_gateway_conforms_081_to_090: 81..=90;
    the_gateway_conforms_091_to_100: 91..=100;
    the_gateway_conforms_101_to_108: 101..=108;
}
