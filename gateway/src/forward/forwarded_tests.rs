#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

const FORGED: [(&str, &str); 6] = [
    ("x-forwarded-for", "1.1.1.1"),
    ("x-forwarded-proto", "https"),
    ("x-forwarded-host", "outside.example"),
    ("x-forwarded-port", "443"),
    ("x-real-ip", "1.1.1.1"),
    ("forwarded", "for=1.1.1.1;proto=https"),
];

fn told(peer: &str, list: &[(&'static str, &str)], options: &Forwarded) -> Vec<(String, String)> {
    let mut client = HeaderMap::new();
    for (name, value) in list {
        client.append(*name, HeaderValue::from_str(value).unwrap());
    }
    let origin = Origin { peer: peer.parse().ok(), host: b"gateway:8080" };
    let mut all = Vec::new();
    tell(&client, origin, options, &mut |name, value| {
        all.push((name.as_str().to_owned(), value.to_str().unwrap().to_owned()));
        Ok::<(), ()>(())
    })
    .unwrap();
    all.sort();
    all
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
}

fn trusting(networks: &[&str]) -> Forwarded {
    Forwarded { trusted: networks.iter().map(|n| n.parse().unwrap()).collect(), ..Forwarded::default() }
}

#[test]
fn a_client_is_not_believed() {
    let own = pairs(&[
        ("x-forwarded-for", "192.0.2.7"),
        ("x-forwarded-host", "gateway:8080"),
        ("x-forwarded-proto", "http"),
        ("x-real-ip", "192.0.2.7"),
    ]);
    assert_eq!(told("192.0.2.7", &[], &Forwarded::default()), own);
    assert_eq!(told("192.0.2.7", &FORGED, &Forwarded::default()), own);
    assert_eq!(told("192.0.2.7", &FORGED, &trusting(&["10.0.0.0/8", "192.0.2.8"])), own);
}

#[test]
fn a_trusted_proxy_is_believed_and_added() {
    for network in ["10.0.0.0/8", "10.1.2.3", "0.0.0.0/0"] {
        assert_eq!(
            told("10.1.2.3", &FORGED, &trusting(&[network])),
            pairs(&[
                ("forwarded", "for=1.1.1.1;proto=https, for=10.1.2.3"),
                ("x-forwarded-for", "1.1.1.1, 10.1.2.3"),
                ("x-forwarded-host", "outside.example"),
                ("x-forwarded-port", "443"),
                ("x-forwarded-proto", "https"),
                ("x-real-ip", "1.1.1.1"),
            ]),
            "{network}"
        );
    }
}

#[test]
fn a_list_in_several_headers_is_one_list() {
    let list = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2, 3.3.3.3")];
    let all = told("10.0.0.1", &list, &trusting(&["10.0.0.1"]));
    assert_eq!(all[0], ("x-forwarded-for".to_owned(), "1.1.1.1, 2.2.2.2, 3.3.3.3, 10.0.0.1".to_owned()));
}

#[test]
fn addresses_are_written_in_their_own_family() {
    assert_eq!(told("::ffff:192.0.2.7", &[], &Forwarded::default())[0].1, "192.0.2.7");
    let all = told("2001:db8::1", &[("forwarded", "for=_x")], &trusting(&["2001:db8::/32"]));
    assert_eq!(all[0].1, "for=_x, for=\"[2001:db8::1]\"");
    assert_eq!(all[1].1, "2001:db8::1");
}

#[test]
fn nothing_is_told_when_nothing_is_to_be_sent() {
    let options = Forwarded { send: ForwardedSend::None, ..trusting(&["10.0.0.0/8"]) };
    assert_eq!(told("10.0.0.1", &FORGED, &options), []);
    assert!(FORGED.iter().all(|(name, _)| tells_origin(&HeaderName::from_static(name))));
}
