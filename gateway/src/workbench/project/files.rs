//! The files of the projects that [`create`](super::create) makes: the example policy `warm-balance` and the SDKs, as they
//! are built and tested in this repository.

/// Files of every project.
pub const COMMON: &[(&str, &str)] = &[
    (".gitignore", include_str!("../../../../policies/examples/warm-balance/project.gitignore")),
    ("README.md", include_str!("../../../../policies/examples/warm-balance/project.README.md")),
    (
        "cases/a-failed-worker-is-not-tried-again/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/a-failed-worker-is-not-tried-again/turn.json"),
    ),
    (
        "cases/a-failed-worker-is-not-tried-again/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/a-failed-worker-is-not-tried-again/fleet.json"),
    ),
    (
        "cases/a-failed-worker-is-not-tried-again/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/a-failed-worker-is-not-tried-again/expect.json"),
    ),
    (
        "cases/all-full-is-as-if-none-were/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/all-full-is-as-if-none-were/turn.json"),
    ),
    (
        "cases/all-full-is-as-if-none-were/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/all-full-is-as-if-none-were/fleet.json"),
    ),
    (
        "cases/all-full-is-as-if-none-were/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/all-full-is-as-if-none-were/expect.json"),
    ),
    (
        "cases/background-is-not-urgent/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/background-is-not-urgent/turn.json"),
    ),
    (
        "cases/background-is-not-urgent/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/background-is-not-urgent/fleet.json"),
    ),
    (
        "cases/background-is-not-urgent/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/background-is-not-urgent/expect.json"),
    ),
    (
        "cases/full-tolerance-is-least-load/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-tolerance-is-least-load/turn.json"),
    ),
    (
        "cases/full-tolerance-is-least-load/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-tolerance-is-least-load/fleet.json"),
    ),
    (
        "cases/full-tolerance-is-least-load/config.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-tolerance-is-least-load/config.json"),
    ),
    (
        "cases/full-tolerance-is-least-load/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-tolerance-is-least-load/expect.json"),
    ),
    (
        "cases/full-workers-are-left-out/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-workers-are-left-out/turn.json"),
    ),
    (
        "cases/full-workers-are-left-out/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-workers-are-left-out/fleet.json"),
    ),
    (
        "cases/full-workers-are-left-out/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/full-workers-are-left-out/expect.json"),
    ),
    (
        "cases/least-loaded-of-the-warm/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/least-loaded-of-the-warm/turn.json"),
    ),
    (
        "cases/least-loaded-of-the-warm/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/least-loaded-of-the-warm/fleet.json"),
    ),
    (
        "cases/least-loaded-of-the-warm/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/least-loaded-of-the-warm/expect.json"),
    ),
    (
        "cases/more-than-three-fallbacks/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/more-than-three-fallbacks/turn.json"),
    ),
    (
        "cases/more-than-three-fallbacks/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/more-than-three-fallbacks/fleet.json"),
    ),
    (
        "cases/more-than-three-fallbacks/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/more-than-three-fallbacks/expect.json"),
    ),
    (
        "cases/no-tolerance-takes-the-warmest/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-tolerance-takes-the-warmest/turn.json"),
    ),
    (
        "cases/no-tolerance-takes-the-warmest/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-tolerance-takes-the-warmest/fleet.json"),
    ),
    (
        "cases/no-tolerance-takes-the-warmest/config.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-tolerance-takes-the-warmest/config.json"),
    ),
    (
        "cases/no-tolerance-takes-the-warmest/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-tolerance-takes-the-warmest/expect.json"),
    ),
    (
        "cases/no-worker-no-decision/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-worker-no-decision/turn.json"),
    ),
    (
        "cases/no-worker-no-decision/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-worker-no-decision/fleet.json"),
    ),
    (
        "cases/no-worker-no-decision/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/no-worker-no-decision/expect.json"),
    ),
    (
        "cases/nothing-cached-is-least-load/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/nothing-cached-is-least-load/turn.json"),
    ),
    (
        "cases/nothing-cached-is-least-load/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/nothing-cached-is-least-load/fleet.json"),
    ),
    (
        "cases/nothing-cached-is-least-load/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/nothing-cached-is-least-load/expect.json"),
    ),
    (
        "cases/only-ready-workers-count/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/only-ready-workers-count/turn.json"),
    ),
    (
        "cases/only-ready-workers-count/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/only-ready-workers-count/fleet.json"),
    ),
    (
        "cases/only-ready-workers-count/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/only-ready-workers-count/expect.json"),
    ),
    (
        "cases/the-rest-is-the-built-ins/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/the-rest-is-the-built-ins/turn.json"),
    ),
    (
        "cases/the-rest-is-the-built-ins/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/the-rest-is-the-built-ins/fleet.json"),
    ),
    (
        "cases/the-rest-is-the-built-ins/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/the-rest-is-the-built-ins/expect.json"),
    ),
    (
        "cases/urgent-takes-a-colder-worker/turn.json",
        include_str!("../../../../policies/examples/warm-balance/cases/urgent-takes-a-colder-worker/turn.json"),
    ),
    (
        "cases/urgent-takes-a-colder-worker/fleet.json",
        include_str!("../../../../policies/examples/warm-balance/cases/urgent-takes-a-colder-worker/fleet.json"),
    ),
    (
        "cases/urgent-takes-a-colder-worker/expect.json",
        include_str!("../../../../policies/examples/warm-balance/cases/urgent-takes-a-colder-worker/expect.json"),
    ),
];

/// Those of a project in Rust.
pub const RUST: &[(&str, &str)] = &[
    ("Cargo.toml", include_str!("../../../../policies/examples/warm-balance/rust/Cargo.project.toml")),
    ("Cargo.lock", include_str!("../../../../policies/Cargo.lock")),
    ("Makefile", include_str!("../../../../policies/examples/warm-balance/rust/Makefile")),
    ("src/lib.rs", include_str!("../../../../policies/examples/warm-balance/rust/src/lib.rs")),
    ("src/choose.rs", include_str!("../../../../policies/examples/warm-balance/rust/src/choose.rs")),
    ("src/tests.rs", include_str!("../../../../policies/examples/warm-balance/rust/src/tests.rs")),
    ("turnstile-policy/Cargo.toml", include_str!("../../../../policies/sdk/Cargo.toml")),
    ("turnstile-policy/src/bulk.rs", include_str!("../../../../policies/sdk/src/bulk.rs")),
    ("turnstile-policy/src/decision.rs", include_str!("../../../../policies/sdk/src/decision.rs")),
    ("turnstile-policy/src/decision_tests.rs", include_str!("../../../../policies/sdk/src/decision_tests.rs")),
    ("turnstile-policy/src/event.rs", include_str!("../../../../policies/sdk/src/event.rs")),
    ("turnstile-policy/src/event_tests.rs", include_str!("../../../../policies/sdk/src/event_tests.rs")),
    ("turnstile-policy/src/facts.rs", include_str!("../../../../policies/sdk/src/facts.rs")),
    ("turnstile-policy/src/facts_tests.rs", include_str!("../../../../policies/sdk/src/facts_tests.rs")),
    ("turnstile-policy/src/guest.rs", include_str!("../../../../policies/sdk/src/guest.rs")),
    ("turnstile-policy/src/host.rs", include_str!("../../../../policies/sdk/src/host.rs")),
    ("turnstile-policy/src/lib.rs", include_str!("../../../../policies/sdk/src/lib.rs")),
    ("turnstile-policy/src/options.rs", include_str!("../../../../policies/sdk/src/options.rs")),
    ("turnstile-policy/src/options_tests.rs", include_str!("../../../../policies/sdk/src/options_tests.rs")),
    ("turnstile-policy/src/policy.rs", include_str!("../../../../policies/sdk/src/policy.rs")),
    ("turnstile-policy/src/testing.rs", include_str!("../../../../policies/sdk/src/testing.rs")),
    ("turnstile-policy/src/workers.rs", include_str!("../../../../policies/sdk/src/workers.rs")),
    ("turnstile-policy/src/workers_tests.rs", include_str!("../../../../policies/sdk/src/workers_tests.rs")),
];

/// In Go.
pub const GO: &[(&str, &str)] = &[
    ("Makefile", include_str!("../../../../policies/examples/warm-balance/go/Makefile")),
    ("go.mod", include_str!("../../../../policies/examples/warm-balance/go/go.mod")),
    ("main.go", include_str!("../../../../policies/examples/warm-balance/go/main.go")),
    ("main_test.go", include_str!("../../../../policies/examples/warm-balance/go/main_test.go")),
    ("turnstile/abi_wasip1.go", include_str!("../../../../policies/sdk-go/abi_wasip1.go")),
    ("turnstile/decision.go", include_str!("../../../../policies/sdk-go/decision.go")),
    ("turnstile/doc.go", include_str!("../../../../policies/sdk-go/doc.go")),
    ("turnstile/event.go", include_str!("../../../../policies/sdk-go/event.go")),
    ("turnstile/fake.go", include_str!("../../../../policies/sdk-go/fake.go")),
    ("turnstile/host.go", include_str!("../../../../policies/sdk-go/host.go")),
    ("turnstile/options.go", include_str!("../../../../policies/sdk-go/options.go")),
    ("turnstile/policy.go", include_str!("../../../../policies/sdk-go/policy.go")),
    ("turnstile/turn.go", include_str!("../../../../policies/sdk-go/turn.go")),
    ("turnstile/turnstile_test.go", include_str!("../../../../policies/sdk-go/turnstile_test.go")),
    ("turnstile/workers.go", include_str!("../../../../policies/sdk-go/workers.go")),
];

/// In AssemblyScript.
pub const ASSEMBLY_SCRIPT: &[(&str, &str)] = &[
    ("Makefile", include_str!("../../../../policies/examples/warm-balance/as/Makefile")),
    ("package.json", include_str!("../../../../policies/examples/warm-balance/as/package.json")),
    ("assembly/index.ts", include_str!("../../../../policies/examples/warm-balance/as/assembly/index.ts")),
    ("turnstile/abi.ts", include_str!("../../../../policies/sdk-as/abi.ts")),
    ("turnstile/decision.ts", include_str!("../../../../policies/sdk-as/decision.ts")),
    ("turnstile/event.ts", include_str!("../../../../policies/sdk-as/event.ts")),
    ("turnstile/exports.ts", include_str!("../../../../policies/sdk-as/exports.ts")),
    ("turnstile/index.ts", include_str!("../../../../policies/sdk-as/index.ts")),
    ("turnstile/options.ts", include_str!("../../../../policies/sdk-as/options.ts")),
    ("turnstile/policy.ts", include_str!("../../../../policies/sdk-as/policy.ts")),
    ("turnstile/turn.ts", include_str!("../../../../policies/sdk-as/turn.ts")),
];

/// In C.
pub const C: &[(&str, &str)] = &[
    ("Makefile", include_str!("../../../../policies/examples/warm-balance/c/Makefile")),
    ("warm-balance.c", include_str!("../../../../policies/examples/warm-balance/c/warm-balance.c")),
    ("turnstile/turnstile.h", include_str!("../../../../policies/sdk-c/turnstile.h")),
];
