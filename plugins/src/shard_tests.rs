use super::*;

fn wait_of(respawn: &mut Respawn, now_ms: u64, jitter: u64) -> u64 {
    assert!(!respawn.missing(now_ms, jitter));
    (now_ms..).find(|at| respawn.missing(*at, 0)).unwrap_or(0) - now_ms
}

#[test]
fn the_wait_doubles_with_every_failure_up_to_thirty_seconds() {
    let mut respawn = Respawn::default();
    let mut now = 1_000;
    let first = wait_of(&mut respawn, now, 0);
    let mut waits = vec![first];
    for _ in 0..10 {
        now += waits.last().copied().unwrap_or(0);
        respawn.failed(now, 0);
        waits.push((now..).find(|at| respawn.missing(*at, 0)).unwrap_or(0) - now);
    }
    assert_eq!(waits, [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 30_000, 30_000]);
}

#[test]
fn jitter_shortens_the_wait_by_less_than_a_quarter() {
    for jitter in [0, 1, 24, 25, 1_000_003, u64::MAX] {
        let wait = wait_of(&mut Respawn::default(), 0, jitter);
        assert!((76..=100).contains(&wait), "{wait}");
    }
}

#[test]
fn an_instance_that_faults_soon_waits_longer_and_one_that_lived_long_does_not() {
    let mut respawn = Respawn::default();
    assert_eq!(wait_of(&mut respawn, 0, 0), 100);
    respawn.alive(100);
    respawn.alive(100 + STABLE_MS - 1);
    assert_eq!(wait_of(&mut respawn, 70_000, 0), 200);
    respawn.alive(80_000);
    respawn.alive(80_000 + STABLE_MS);
    assert_eq!(wait_of(&mut respawn, 200_000, 0), 100);
}
