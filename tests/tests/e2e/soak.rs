//! A short soak; `make soak` is a long one, which also looks at memory and at every failed turn.

use std::time::Duration;
use turnstile_tests::soak::{Pace, Settings, run};

#[tokio::test(flavor = "multi_thread")]
async fn after_agents_and_faults_of_every_kind_all_counts_are_back_where_they_began() {
    let settings = Settings {
        time: Duration::from_secs(9),
        seed: 1,
        agents: 4,
        examples: false,
        program: env!("CARGO_BIN_EXE_turnstile-process").into(),
        pace: Pace::SHORT,
    };
    let soaked = run(settings).await.unwrap();
    assert!(soaked.right > 0, "no turn had an answer");
    assert!(soaked.left.is_empty(), "{:?}", soaked.left);
}
