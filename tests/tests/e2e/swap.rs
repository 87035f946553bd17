//! Policies and configuration are swapped all the time, and no turn notices.

use crate::reload::{chain, reload};
use crate::traffic::{STREAMS, Traffic};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};
use turnstile_tests::harness::{Setup, module, swap};

const TURNS: usize = 1000;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streaming_turns_through_a_reload_every_200_ms_are_neither_failed_nor_altered() {
    let modules = ["kv-affinity", "tenant-labels"].map(|name| std::fs::read(module(name)).unwrap());
    let mut rig = Setup::new()
        .sim(|c| c.speed = 20.0)
        .workers(3)
        .pool("default", "", &[0, 1, 2])
        .file("extra.wasm", modules[1].clone())
        .plugins(&chain(50))
        .start()
        .await;
    let mut traffic = Traffic::start(&rig, TURNS).await;
    let mut ticks = interval(Duration::from_millis(200));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut configurations, mut policies) = (0, 0);
    while traffic.served() < TURNS {
        ticks.tick().await;
        traffic.check();
        if configurations <= policies {
            configurations += 1;
            rig.edit(|setup| setup.set_plugins(&chain(50 + configurations)));
        } else {
            swap(&rig.dir().join("extra.wasm"), &modules[policies as usize % 2]);
            policies += 1;
        }
        // The watch may have been faster; either way the change serves when this is answered.
        let answer = reload(&rig).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    traffic.end().await;
    let changes = f64::from(configurations + policies);
    assert_eq!(rig.metric("turnstile_reloads_total", &[("result", "ok")]).await, changes);
    assert_eq!(rig.metric("turnstile_reloads_total", &[("result", "failed")]).await, 0.0);
    assert!(configurations > 2 && policies > 2, "{configurations} {policies}");
    let log = rig.access_log();
    assert!(log.iter().all(|line| line["status"] == 200 && line["attempts"] == 1 && line["end"] == "finished"));
    let generations: std::collections::BTreeSet<u64> =
        log.iter().filter_map(|line| line["generation"].as_u64()).collect();
    println!(
        "{TURNS} streaming turns at {STREAMS} at once, {changes} reloads ({configurations} of the configuration, {policies} of a \
         policy's module), served by {} generations: 0 failed, 0 altered",
        generations.len()
    );
}
