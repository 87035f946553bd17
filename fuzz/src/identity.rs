//! Who is asking.

use bytes::Bytes;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use turnstile_fleet::body::scan;
use turnstile_fleet::hints::parse;
use turnstile_fleet::identity::{ANONYMOUS, Identity, IdentityOptions, SessionId, identify, session_key, tenant_of};

use super::input::request;

const SEED: u64 = 7;

/// Two tenants share no key whatever they send, and one tenant's keys follow from its names. The input is a request as text.
pub fn identity(data: &[u8]) {
    let (route, headers, body) = request(data);
    let empty = Bytes::from_static(b"{}");
    let members = scan(&Bytes::copy_from_slice(body)).unwrap_or_else(|_| scan(&empty).expect("an object"));
    let options = IdentityOptions::new(SEED);
    let of = |headers: &HeaderMap| {
        let control = parse(&members, headers, options.id_max_bytes, true).map(|e| e.control).unwrap_or_default();
        identify(route, headers, &members, &control, &options)
    };
    let told = of(&headers);
    assert_eq!(told, of(&headers), "the same request is the same client");
    assert_eq!(told.tenant, tenant_of(&headers, SEED));
    check(&told, &options);

    let with = |credential: Option<&'static str>| {
        let mut headers = headers.clone();
        headers.remove(AUTHORIZATION);
        headers.remove("x-api-key");
        if let Some(credential) = credential {
            headers.insert(AUTHORIZATION, http::HeaderValue::from_static(credential));
        }
        of(&headers)
    };
    let tenants = [with(Some("Bearer one")), with(Some("Bearer two")), with(None)];
    assert_eq!(tenants[2].tenant, ANONYMOUS);
    for (index, one) in tenants.iter().enumerate() {
        check(one, &options);
        for other in &tenants[index + 1..] {
            assert_ne!(one.tenant, other.tenant);
            // A credential changes whose the names are, and nothing else.
            assert_eq!(texts(one), texts(other));
            for key in ids(one).flatten().map(|id| id.key) {
                assert!(ids(other).flatten().all(|id| id.key != key), "two tenants share a key");
            }
        }
    }
}

fn check(identity: &Identity, options: &IdentityOptions) {
    for id in ids(identity).flatten() {
        assert_eq!(id.key, session_key(SEED, identity.tenant, &id.text));
        assert!(!id.text.trim().is_empty());
        // A session and an agent within it.
        assert!(id.text.len() <= 2 * options.id_max_bytes + 1, "{} bytes", id.text.len());
    }
    assert!(identity.session.is_none() || identity.tree.is_some());
    assert!(identity.parent.is_none() || identity.parent != identity.session);
}

fn ids(identity: &Identity) -> impl Iterator<Item = Option<&SessionId>> {
    [&identity.session, &identity.tree, &identity.parent].into_iter().map(Option::as_ref)
}

fn texts(identity: &Identity) -> Vec<Option<&str>> {
    ids(identity).map(|id| id.map(|id| id.text.as_str())).collect()
}
