//! What Envoy's SDKs name a gRPC service by: a serialized `envoy.config.core.v3.GrpcService`, of which only
//! `envoy_grpc.cluster_name` (field 1 of field 1) matters here.

/// The cluster that a serialized service names, if it is one.
pub(crate) fn cluster_name(service: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(field_1(field_1(service)?)?).ok()?;
    (!name.is_empty()).then_some(name)
}

/// Field 1, of bytes, of a message that is well formed as far as that is looked at. The last one counts.
fn field_1(mut message: &[u8]) -> Option<&[u8]> {
    let mut found = None;
    while !message.is_empty() {
        let (key, rest) = varint(message)?;
        message = match key & 7 {
            0 => varint(rest)?.1,
            1 => rest.get(8..)?,
            2 => {
                let (len, rest) = varint(rest)?;
                let (value, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
                if key >> 3 == 1 {
                    found = Some(value);
                }
                rest
            }
            5 => rest.get(4..)?,
            _ => return None,
        };
    }
    found
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (at, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(u32::try_from(7 * at).ok()?)?;
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(at + 1..)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_name_is_found_among_other_fields() {
        // envoy_grpc { cluster_name: "auth" authority: "x" }, timeout {}
        let service = b"\x0a\x09\x0a\x04auth\x12\x01x\x1a\x00";
        assert_eq!(cluster_name(service), Some("auth"));
        // The same behind a number, a fixed64 and a fixed32 of other fields.
        let mut mixed = vec![0x28, 0x96, 0x01, 0x31, 1, 2, 3, 4, 5, 6, 7, 8, 0x3d, 1, 2, 3, 4];
        mixed.extend_from_slice(service);
        assert_eq!(cluster_name(&mixed), Some("auth"));
    }

    #[test]
    fn what_is_no_such_message_names_nothing() {
        let cut = b"\x0a\x09\x0a\x04aut";
        let google = b"\x12\x03\x0a\x01x";
        let not_utf8 = b"\x0a\x03\x0a\x01\xff";
        let no_name = b"\x0a\x02\x0a\x00";
        let endless = &[0xff; 16];
        let group = b"\x0b";
        for service in [&b""[..], cut, google, not_utf8, no_name, endless, group, b"auth-service"] {
            assert_eq!(cluster_name(service), None, "{service:?}");
        }
    }
}
