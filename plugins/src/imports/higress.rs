//! What Higress' dialect has beyond Proxy-Wasm: Redis calls, the hosts of an upstream and the choice among them, pieces of a
//! response's body that the plugin makes itself.

use std::time::Duration;

use bytes::Bytes;
use wasmtime::Linker;

use super::callouts::{name, start, timeout};
use super::{mistake, run};
use crate::abi::Status;
use crate::callout::{CallKind, Callout, RedisCallout, RedisLogin};
use crate::guest_memory::{Call, Hostcall, bytes, check_writable, hand_over, split, with_env};
use crate::host::Host;
use crate::outcome::Injected;
use crate::pairs;
use crate::redis_command;

/// Longest user name or password of a Redis connection, bytes.
const MAX_CREDENTIAL: usize = 1024;
/// Most names of Redis upstreams that an instance keeps options for.
const MAX_REDIS_NAMES: usize = 64;
/// Longest list of addresses that a guest may override the host with, bytes.
const MAX_ADDRESS: usize = 1024;
/// Pieces of a body that one callback may inject.
const MAX_INJECTED: usize = 1024;

/// How a guest wants to call a Redis server.
#[derive(Clone, Debug, Default)]
pub(crate) struct RedisOptions {
    login: RedisLogin,
    timeout: Option<Duration>,
}

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_redis_init",
        |call: Call<'_>,
         upstream: u32,
         upstream_len: u32,
         username: u32,
         username_len: u32,
         password: u32,
         password_len: u32,
         timeout_ms: i32| {
            let login = ((username, username_len), (password, password_len));
            run(call, |call| redis_init(call, (upstream, upstream_len), login, timeout_ms))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_redis_call",
        |call: Call<'_>, upstream: u32, upstream_len: u32, query: u32, query_len: u32, token_at: u32| {
            run(call, |call| redis_call(call, (upstream, upstream_len), (query, query_len), token_at))
        },
    )?;
    linker.func_wrap("env", "proxy_get_upstream_hosts", |call: Call<'_>, pp: u32, np: u32| {
        run(call, |call| upstream_hosts(call, pp, np))
    })?;
    linker.func_wrap("env", "proxy_set_upstream_override_host", |call: Call<'_>, p: u32, n: u32| {
        run(call, |call| override_host(call, p, n))
    })?;
    linker.func_wrap(
        "env",
        "proxy_inject_encoded_data_to_filter_chain",
        |call: Call<'_>, p: u32, n: u32, end: u32| run(call, |call| inject(call, p, n, end != 0)),
    )?;
    Ok(())
}

/// An upstream's name without the options that a guest may append to it, and these.
fn without_options(name: &str) -> (&str, &str) {
    name.split_once('?').unwrap_or((name, ""))
}

fn redis_init(
    call: &mut Call<'_>,
    upstream: (u32, u32),
    (username, password): ((u32, u32), (u32, u32)),
    timeout_ms: i32,
) -> Hostcall {
    let (memory, host) = split(call)?;
    let upstream = name(bytes(memory, upstream.0, upstream.1)?)?;
    let (upstream, options) = without_options(&upstream);
    if !host.plugin.services.has_redis(&host.plugin.spec.name, upstream) {
        return Err(Status::BadArgument.into());
    }
    let credential = |(ptr, len)| -> Result<Option<String>, Status> {
        let text = std::str::from_utf8(bytes(memory, ptr, len)?).map_err(|_| Status::BadArgument)?;
        let fits = text.len() <= MAX_CREDENTIAL;
        if fits { Ok((!text.is_empty()).then(|| text.to_owned())) } else { Err(Status::BadArgument) }
    };
    // Higress' other options are about how it gathers commands before it sends them.
    let database = options.split('&').find_map(|option| option.strip_prefix("db="));
    let database = database.map(|text| text.parse().map_err(|_| Status::BadArgument)).transpose()?;
    let login = RedisLogin { username: credential(username)?, password: credential(password)?, database };
    let options = RedisOptions { login, timeout: timeout(timeout_ms)? };
    // A cluster has any number of names, and each is kept as it was written.
    if host.redis.len() >= MAX_REDIS_NAMES && !host.redis.contains_key(upstream) {
        return Err(Status::BadArgument.into());
    }
    host.redis.insert(upstream.to_owned(), options);
    Ok(())
}

fn redis_call(call: &mut Call<'_>, upstream: (u32, u32), query: (u32, u32), token_at: u32) -> Hostcall {
    check_writable(call, token_at, 4)?;
    let (memory, host) = split(call)?;
    let upstream = name(bytes(memory, upstream.0, upstream.1)?)?;
    let (upstream, _) = without_options(&upstream);
    if !host.plugin.services.has_redis(&host.plugin.spec.name, upstream) {
        return Err(Status::BadArgument.into());
    }
    let query = bytes(memory, query.0, query.1)?;
    let most = host.plugin.spec.limits.callout_body_bytes;
    if query.len() > most {
        return Err(Status::InternalFailure.into());
    }
    let command = redis_command::parse(query).map_err(|problem| {
        host.plugin.log(crate::abi::LogLevel::Warn, format!("refused a Redis call: {problem}").as_bytes());
        Status::BadArgument
    })?;
    let RedisOptions { login, timeout } = host.redis.get(upstream).cloned().unwrap_or_default();
    let callout = RedisCallout { upstream: upstream.to_owned(), login, command, timeout, max_reply: most };
    start(call, CallKind::Redis, Callout::Redis(callout), token_at)
}

fn upstream_hosts(call: &mut Call<'_>, pp: u32, np: u32) -> Hostcall {
    check_writable(call, pp, 4)?;
    check_writable(call, np, 4)?;
    let hosts = with_env(call, |_, env| env.upstream_hosts()).flatten().ok_or(Status::NotFound)?;
    if hosts.is_empty() {
        return hand_over(call, &[], pp, np);
    }
    let mut serialized = std::mem::take(&mut call.data_mut().scratch);
    serialized.clear();
    pairs::write_texts(&hosts, &mut serialized);
    let handed = hand_over(call, &serialized, pp, np);
    call.data_mut().scratch = serialized;
    handed
}

fn override_host(call: &mut Call<'_>, p: u32, n: u32) -> Hostcall {
    let (memory, host) = split(call)?;
    let address = bytes(memory, p, n)?;
    if address.len() > MAX_ADDRESS {
        return Err(Status::BadArgument.into());
    }
    let Some(env) = host.env() else {
        return mistake(host, Status::NotFound, format_args!("host overridden outside of a stream"));
    };
    match env.override_host(address) {
        Ok(()) => Ok(()),
        Err(status) => mistake(host, status, format_args!("host cannot be overridden so")),
    }
}

fn inject(call: &mut Call<'_>, p: u32, n: u32, end: bool) -> Hostcall {
    let (memory, host) = split(call)?;
    let data = Bytes::copy_from_slice(bytes(memory, p, n)?);
    let most = host.plugin.spec.limits.held_body_bytes;
    let Some(effects) = host.effects() else {
        return mistake(host, Status::BadArgument, format_args!("a body injected outside of a stream"));
    };
    let held: usize = effects.injected.iter().map(|piece| piece.data.len()).sum();
    if effects.injected.len() >= MAX_INJECTED || held.saturating_add(data.len()) > most {
        // Not tolerated: the guest must not believe that the client gets it.
        return Err(Status::BadArgument.into());
    }
    effects.injected.push(Injected { data, end });
    Ok(())
}
