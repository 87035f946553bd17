//! Names of clusters: `outbound|PORT|SUBSET|SERVICE`, where the service ends with the name of the registry that it comes from.

/// What comes behind a service's own name where Higress' registries add something to it.
const REGISTRIES: [&str; 2] = [".static", ".dns"];

/// What a cluster's name may stand for here, the nearest first: itself, its service, the service less its registry, and the
/// service up to its first dot.
pub fn names(cluster: &str) -> impl Iterator<Item = &str> {
    let mut fields = cluster.split('|');
    let is_service = cluster.matches('|').count() == 3 && fields.next() == Some("outbound");
    let service = is_service.then(|| cluster.rsplit('|').next()).flatten();
    let plain = service.and_then(|service| REGISTRIES.iter().find_map(|registry| service.strip_suffix(registry)));
    let first = service.and_then(|service| service.split('.').next());
    std::iter::once(cluster).chain(service).chain(plain).chain(first).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn a_cluster_stands_for_its_service_with_and_without_what_its_registry_adds() {
        let all = |cluster| names(cluster).collect::<Vec<_>>();
        assert_eq!(all("worker-a"), ["worker-a"]);
        assert_eq!(all("10.0.0.1:30000"), ["10.0.0.1:30000"]);
        assert_eq!(all("outbound|80||a.static"), ["outbound|80||a.static", "a.static", "a", "a"]);
        assert_eq!(all("outbound|80||gpu.7.dns")[1..], ["gpu.7.dns", "gpu.7", "gpu"]);
        assert_eq!(all("outbound|80|v1|a.ns.svc.cluster.local")[1..], ["a.ns.svc.cluster.local", "a"]);
    }

    #[test]
    fn anything_else_stands_for_itself() {
        for odd in ["outbound|80||", "|||a", "outbound|80|a", "inbound|80||a", "outbound|1|2|3|a", "a.static"] {
            assert_eq!(names(odd).collect::<Vec<_>>(), [odd]);
        }
        assert_eq!(names("").count(), 0);
    }
}
