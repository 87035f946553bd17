//! The price of plugins, as medians of the rounds and as the least of them: the same requests through plain pingora, the gateway with none, with its policies, with filters, and
//! through Envoy with none and with the same filters. Each proxy has one thread and no access log.

use crate::process::{Role, free_address, listens};
use crate::report::median;
use crate::rounds::{Effort, Kind, WORKERS, ready};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::{Child, Command};
use turnstile_tests::process::Gateway;

/// Modules that do nothing: one built from the public Rust SDK, and one in Go.
const NO_OPS: [(&str, &str); 2] = [
    ("Rust no-op", concat!(env!("CARGO_MANIFEST_DIR"), "/../policies/dist/test/noop.wasm")),
    ("Go no-op", concat!(env!("CARGO_MANIFEST_DIR"), "/../policies/dist/test/noop-go.wasm")),
];

/// A proxy that runs.
struct Proxy {
    name: String,
    address: SocketAddr,
    pid: u32,
    running: Running,
}

enum Running {
    Plain(Role),
    Gateway(Box<Gateway>),
    Envoy(Child),
}

/// Measures all of them and gives a table.
///
/// # Errors
/// A proxy did not start, or a request failed.
pub async fn measure(
    dir: &Path,
    effort: &Effort,
    filters: &[(String, PathBuf)],
    envoy: Option<&Path>,
) -> Result<String, String> {
    let mut modules: Vec<_> = NO_OPS.iter().map(|(name, file)| ((*name).to_owned(), PathBuf::from(file))).collect();
    modules.extend_from_slice(filters);
    for (name, file) in &mut modules {
        *file = file.canonicalize().map_err(|e| format!("the module of {name}: {}: {e}", file.display()))?;
    }
    let upstream = Role::start(&["--role", "upstream", &WORKERS.to_string()]).await?;
    let proxies = start(dir, &upstream.said, &modules, envoy).await?;
    let kinds = [
        Kind::whole("chat 500 B", 500, 64, 8, 4000, None),
        Kind::whole("chat 30 KB", 30_000, 32, 4, 2000, None),
        Kind::stream("SSE chunk, alone", "1 2", None),
        Kind::stream("SSE chunk, in bursts", "8 16", None),
    ];
    let mut text = String::new();
    for kind in kinds.iter().filter(|kind| kind.name.contains(&effort.only)) {
        let rounds = rounds(kind, &proxies, effort).await?;
        let _ = writeln!(
            text,
            "{:<44} {:>10} {:>18} {:>10} {:>18}",
            kind.name, "CPU, us", "to plain pingora", "least, us", "to plain pingora"
        );
        let least = |costs: &[f64]| costs.iter().copied().fold(f64::INFINITY, f64::min);
        let plain = rounds.first().cloned().unwrap_or_default();
        for (proxy, costs) in proxies.iter().zip(&rounds) {
            let mut ratios: Vec<f64> = costs.iter().zip(&plain).map(|(cost, plain)| cost / plain).collect();
            let cost = median(&mut costs.clone());
            // Whatever else the machine does adds to a round, so the least of many is nearest to the work itself.
            let floor = least(costs);
            let _ = writeln!(
                text,
                "  {:<42} {cost:>10.2} {:>18.2} {floor:>10.2} {:>18.2}",
                proxy.name,
                median(&mut ratios),
                floor / least(&plain)
            );
        }
    }
    for proxy in proxies {
        proxy.stop().await?;
    }
    upstream.end().await;
    Ok(text)
}

/// Costs by proxy and round.
async fn rounds(kind: &Kind, proxies: &[Proxy], effort: &Effort) -> Result<Vec<Vec<f64>>, String> {
    let mixes = kind.mixes();
    let total = kind.total(effort);
    let mut costs = vec![Vec::new(); proxies.len()];
    for round in 0..effort.rounds {
        // They take turns at being first.
        for turn in 0..proxies.len() {
            let place = (round + turn) % proxies.len();
            if let (Some(proxy), Some(costs)) = (proxies.get(place), costs.get_mut(place)) {
                costs.push(kind.cost_us(&mixes, proxy.address, proxy.pid, round * total, total).await?);
            }
        }
        eprintln!("{}: round {} of {}", kind.name, round + 1, effort.rounds);
    }
    Ok(costs)
}

async fn start(
    dir: &Path,
    upstreams: &str,
    modules: &[(String, PathBuf)],
    envoy: Option<&Path>,
) -> Result<Vec<Proxy>, String> {
    let address = free_address()?;
    let plain = Role::start(&["--role", "plain", &address.to_string(), upstreams]).await?;
    listens(address).await?;
    let pid = plain.pid()?;
    let mut proxies = vec![Proxy { name: "plain pingora".into(), address, pid, running: Running::Plain(plain) }];
    proxies.push(gateway(dir, "turnstile, no plugin", upstreams, Some(&[])).await?);
    proxies.push(gateway(dir, "turnstile, three built-in policies", upstreams, None).await?);
    for (name, file) in modules {
        let name = format!("turnstile, filter: {name}");
        proxies.push(gateway(dir, &name, upstreams, Some(std::slice::from_ref(file))).await?);
    }
    if let Some(binary) = envoy {
        proxies.push(self::envoy(dir, binary, "Envoy, no plugin".into(), upstreams, None).await?);
        for (name, file) in modules {
            let name = format!("Envoy, filter: {name}");
            proxies.push(self::envoy(dir, binary, name, upstreams, Some(file)).await?);
        }
    }
    Ok(proxies)
}

/// A gateway with filters, or with the built-in policies where no list is given.
async fn gateway(dir: &Path, name: &str, upstreams: &str, filters: Option<&[PathBuf]>) -> Result<Proxy, String> {
    let own = tempfile::Builder::new().prefix("gateway-").tempdir_in(dir).map_err(|e| e.to_string())?.keep();
    let workers: Vec<Value> = upstreams.split(' ').map(|address| json!(format!("http://{address}"))).collect();
    let text = |path: &Path| Value::from(path.display().to_string());
    let mut config = String::from("threads = 1\n");
    match filters {
        Some([]) => config.push_str("plugins = []\n"),
        Some(files) => {
            for (place, file) in files.iter().enumerate() {
                let file = text(file);
                let _ = writeln!(config, "[[plugins]]\nname = \"filter-{place}\"\nwasm = {file}\nphase = \"filter\"");
            }
        }
        None => {}
    }
    let _ = write!(
        config,
        "[[listeners]]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n[logging]\naccess = \"off\"\n\
         [state]\ndir = {}\n[[pools]]\nworkers = {}\n",
        text(&own.join("state")),
        Value::from(workers)
    );
    let path = own.join("turnstile.toml");
    std::fs::write(&path, config).map_err(|e| format!("{}: {e}", path.display()))?;
    let gateway = Gateway::start(&path).await?;
    ready(&gateway).await?;
    let pid = gateway.child.id().ok_or("a gateway has ended")?;
    Ok(Proxy { name: name.into(), address: gateway.address, pid, running: Running::Gateway(Box::new(gateway)) })
}

async fn envoy(
    dir: &Path,
    binary: &Path,
    name: String,
    upstreams: &str,
    filter: Option<&PathBuf>,
) -> Result<Proxy, String> {
    let own = tempfile::Builder::new().prefix("envoy-").tempdir_in(dir).map_err(|e| e.to_string())?.keep();
    let address = free_address()?;
    let path = own.join("envoy.json");
    std::fs::write(&path, bootstrap(address, upstreams, filter).to_string())
        .map_err(|e| format!("{}: {e}", path.display()))?;
    let log = std::fs::File::create(own.join("envoy.log")).map_err(|e| e.to_string())?;
    let child = Command::new(binary)
        .arg("--config-path")
        .arg(&path)
        .args(["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| format!("cannot start {}: {e}", binary.display()))?;
    let pid = child.id().ok_or("Envoy has ended")?;
    if let Err(reason) = listens(address).await {
        let said = std::fs::read_to_string(own.join("envoy.log")).unwrap_or_default();
        return Err(format!("{reason}; Envoy said:\n{said}"));
    }
    Ok(Proxy { name, address, pid, running: Running::Envoy(child) })
}

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}})
}

/// Envoy's configuration: one listener, one cluster of all upstreams, the filter.
fn bootstrap(address: SocketAddr, upstreams: &str, filter: Option<&PathBuf>) -> Value {
    let endpoints: Vec<Value> = upstreams
        .split(' ')
        .filter_map(|address| address.parse().ok())
        .map(|address| json!({"endpoint": {"address": socket(address)}}))
        .collect();
    let wasm = filter.map(|file| {
        json!({
            "name": "wasm",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
                "config": {
                    "name": "filter",
                    "root_id": "filter",
                    "vm_config": {
                        "vm_id": "filter",
                        "runtime": "envoy.wasm.runtime.v8",
                        "code": {"local": {"filename": file.display().to_string()}},
                    },
                },
            },
        })
    });
    let router = json!({
        "name": "router",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
    });
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [{
                "name": "all",
                "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}],
            }],
        },
        "http_filters": wasm.into_iter().chain([router]).collect::<Vec<_>>(),
    });
    json!({
        "static_resources": {
            "listeners": [{
                "address": socket(address),
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
            }],
            "clusters": [{
                "name": "workers",
                "connect_timeout": "1s",
                "type": "STATIC",
                "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
            }],
        },
    })
}

impl Proxy {
    async fn stop(self) -> Result<(), String> {
        match self.running {
            Running::Plain(role) => role.end().await,
            Running::Gateway(gateway) => {
                let (status, log) = gateway.stop().await?;
                if !status.success() {
                    return Err(format!("a gateway ended with {status}:\n{}", log.join("\n")));
                }
            }
            Running::Envoy(mut child) => {
                let _ = child.kill().await;
            }
        }
        Ok(())
    }
}
