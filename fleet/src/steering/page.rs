//! `docs/steering.md`, written from the table.

use std::fmt::Write;

use super::{ROWS, Row, Rule};
use crate::route::Route;

const INTRODUCTION: &str = "\
# Fields that steer

<!-- Generated from the table in fleet/src/steering.rs: UPDATE_DOCS=1 cargo nextest run -p turnstile -E 'test(docs_are_fresh)' -->

A worker believes whoever sends it a request: which engine session it continues, on which rank it runs, what it is called, whose
cache it shares. A gateway in front of it has to say these things itself. Each member of a request body, and each header, that
would steer a worker or forge what the gateway says is in the table; everything else goes to the worker byte for byte.

What becomes of a field is the value of its option in `[steering]`; the first one is the default.

- `drop`: it is taken out.
- `refuse`: the request is answered 400, naming the field. On routes on which workers do not read it, it is dropped.
- `take`: the gateway reads it and takes it out; the worker gets what the gateway makes of it.
- `scope`, `isolate`: it is replaced by a digest of it and the client's credential.
- `pass`: it goes on as it came.

";

const REST: &str = "
Only top-level members count, as for the worker. Keys are compared with their escapes resolved (`\"cache_s\\u0061lt\"` is
`cache_salt`). Of a repeated key the last one counts, as for the worker, and all of them are taken out or replaced. `null` asks
for nothing. Lists, as a batch on `/generate` has them, are treated as what is in them. Filters see a request before the
table is applied, and what they put into it is treated like a client's.

`turnstile_steering_total` counts the requests that had such a member.

## Namespaces of the cache

A client names a cache of its own by the header `x-tenant-id`, by `nvext.cache_salt` or by `cache_salt`; the first one of these
that is there counts (as in Dynamo). What the worker gets is a digest of the name and of the client's credential, the bearer
token or `x-api-key`: nobody with another credential can name the same cache, whatever they send, and the same client finds its
cache again through any gateway and after any restart. Without a name there is one cache for all, which is what makes a system
prompt that many share cheap, and lets a client learn from its timing whether somebody else has sent a prefix before; `isolate`
ends both. `extra_key` is the same for workers before 0.5.18, which have no `cache_salt`. `/v1/messages` takes neither.

## Sessions and requests

A session's name is scoped by the credential, too (`docs/agents.md`), and the worker's own names for sessions and requests are
random ones of the gateway: no client can continue, close or abort what another one has.

## Who the client is

`[forwarded]` says what a worker is told in `x-forwarded-for`, `x-forwarded-proto`, `x-forwarded-host`, `x-forwarded-port`, `x-real-ip` and
`forwarded`. By default the gateway drops what came in them and sets `x-forwarded-for` and `x-real-ip` to the address of the
connection, `x-forwarded-proto` to `http` and `x-forwarded-host` to the host asked for. A peer in `forwarded.trusted` is
believed instead: its address is added to `x-forwarded-for` (and to `forwarded`, if it is there), the others stay as it set them.
SGLang's HTTP server (uvicorn) takes the client's address and scheme from these headers only where the gateway is on the same
machine or in its `FORWARDED_ALLOW_IPS`.

## Headers that always stop or change

| header | what becomes of it |
| --- | --- |
| `connection` and what it names, `keep-alive`, `proxy-authenticate`, `proxy-authorization`, `proxy-connection`, `te`, `trailer`, `transfer-encoding`, `upgrade` | end here: they are about one connection |
| `host`, `content-length` | set for the worker |
| `expect`, `content-encoding`, `accept-encoding` | end here: the gateway has the body, and the answer must be readable |
| `x-request-id` | the request's id in the logs; a client's is kept where `logging.accept_request_id` allows |
| `x-turnstile-*` | end here; `x-turnstile-explain` is read where `logging.explain_headers` allows |
| `authorization`, `x-api-key` | replaced by the worker's key where the configuration has one; else passed, unless `steering.credentials = \"drop\"` |
| `x-higress-target-cluster`, `x-gateway-destination-endpoint`, `x-envoy-original-dst-host` | end here, before any plugin sees them; what a plugin with `dialect = \"higress\"` writes there is read (`docs/higress.md`) |
| names of sessions (`sessions.id_headers`), `traceparent`, `tracestate`, `x-sglext-ids-framed` and all others | pass |
";

/// The page.
pub fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    // Writing to a `String` cannot fail.
    let _ = table(&mut page);
    page.push_str(REST);
    page
}

fn table(page: &mut String) -> std::fmt::Result {
    writeln!(page, "| option | members | headers | read by workers on | what a worker does with it | values |")?;
    writeln!(page, "| --- | --- | --- | --- | --- | --- |")?;
    for row in ROWS.iter().filter(|row| !row.key.is_empty()) {
        let values = quoted(row.rule.choices().iter().map(|action| action.name()));
        writeln!(
            page,
            "| `{}` | {} | {} | {} | {} | {values} |",
            row.key,
            quoted(row.members.iter().copied()),
            quoted(row.headers.iter().copied()),
            routes(row),
            row.worker,
        )?;
    }
    Ok(())
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "–".to_owned() } else { names.join(", ") }
}

fn routes(row: &Row) -> String {
    if row.members.is_empty() {
        return match row.rule {
            Rule::OverrideHeaders => "chat, generate, messages".to_owned(),
            _ => "–".to_owned(),
        };
    }
    Route::ALL.iter().filter(|route| row.rule.is_read(**route)).map(|route| route.name()).collect::<Vec<_>>().join(", ")
}
