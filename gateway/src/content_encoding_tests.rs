#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use http::HeaderValue;
use std::io::Write;

const CODINGS: [Coding; 4] = [Coding::Gzip, Coding::Deflate, Coding::Brotli, Coding::Zstd];

fn encode(coding: Coding, body: &[u8]) -> Vec<u8> {
    match coding {
        Coding::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        Coding::Deflate => {
            let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        Coding::Brotli => {
            let mut out = Vec::new();
            brotli::CompressorWriter::new(&mut out, 4096, 5, 22).write_all(body).unwrap();
            out
        }
        Coding::Zstd => {
            // With a checksum, as the command line tool writes it.
            let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
            encoder.include_checksum(true).unwrap();
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
    }
}

/// Bytes that do not compress away.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(size).collect()
}

#[test]
fn what_was_encoded_comes_out_again() {
    for coding in CODINGS {
        for body in [Vec::new(), b"{\"model\":\"sim\"}".to_vec(), vec![b'a'; 1 << 20], noise(300_000)] {
            let decoded = coding.decode(&encode(coding, &body), 1 << 20);
            assert_eq!(decoded.as_deref(), Ok(body.as_slice()), "{coding:?} {}", body.len());
        }
    }
}

#[test]
fn bare_deflate_is_deflate_too() {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(b"{\"model\":\"sim\"}").unwrap();
    assert_eq!(Coding::Deflate.decode(&encoder.finish().unwrap(), 100).unwrap(), b"{\"model\":\"sim\"}");
}

#[test]
fn gzip_members_and_zstd_frames_in_a_row_are_one_body() {
    for coding in [Coding::Gzip, Coding::Zstd] {
        let twice = [encode(coding, b"one,"), encode(coding, b"two")].concat();
        assert_eq!(coding.decode(&twice, 7).unwrap(), b"one,two", "{coding:?}");
        assert_eq!(coding.decode(&twice, 6), Err(Undecoded::TooLarge), "{coding:?}: the limit is for all together");
    }
}

#[test]
fn the_limit_is_exact_and_a_bomb_stops_there() {
    for coding in CODINGS {
        let body = vec![b'0'; 1 << 20];
        let encoded = encode(coding, &body);
        assert_eq!(coding.decode(&encoded, body.len()).unwrap().len(), body.len(), "{coding:?}");
        assert_eq!(coding.decode(&encoded, body.len() - 1), Err(Undecoded::TooLarge), "{coding:?}");
        assert_eq!(coding.decode(&encoded, 10), Err(Undecoded::TooLarge), "{coding:?}");
    }
}

#[test]
fn a_body_cut_short_anywhere_is_broken() {
    for coding in CODINGS {
        let encoded = encode(coding, &noise(5000));
        for cut in (1..encoded.len()).step_by(97).chain([encoded.len() - 1]) {
            let decoded = coding.decode(encoded.get(..cut).unwrap(), 1 << 20);
            assert_eq!(decoded, Err(Undecoded::Broken), "{coding:?} cut at {cut} of {}", encoded.len());
        }
    }
}

#[test]
fn bytes_behind_the_body_are_not_overlooked() {
    for coding in CODINGS {
        let mut encoded = encode(coding, b"{}");
        encoded.extend_from_slice(b"{\"more\":1}");
        assert_eq!(coding.decode(&encoded, 1 << 20), Err(Undecoded::Broken), "{coding:?}");
    }
}

#[test]
fn damaged_bytes_never_panic_and_never_exceed_the_limit() {
    for coding in CODINGS {
        let encoded = encode(coding, &noise(3000));
        for at in 0..encoded.len() {
            let mut damaged = encoded.clone();
            *damaged.get_mut(at).unwrap() ^= 0xff;
            if let Ok(decoded) = coding.decode(&damaged, 4000) {
                assert!(decoded.len() <= 4000);
            }
        }
        assert_eq!(coding.decode(&noise(1000), 1 << 20), Err(Undecoded::Broken), "{coding:?}");
    }
}

#[test]
fn a_zstd_window_over_eight_mebibytes_is_refused() {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(27).unwrap();
    encoder.long_distance_matching(true).unwrap();
    encoder.write_all(&vec![b'0'; 64 << 20]).unwrap();
    let encoded = encoder.finish().unwrap();
    assert_eq!(Coding::Zstd.decode(&encoded, 128 << 20), Err(Undecoded::Broken));
}

fn headers(values: &[&'static str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append("content-encoding", HeaderValue::from_static(value));
    }
    headers
}

#[test]
fn one_coding_is_taken_by_its_name_in_any_case() {
    for (values, coding) in [
        (&[][..], None),
        (&["identity"], None),
        (&[""], None),
        (&["gzip"], Some(Coding::Gzip)),
        (&["X-GZip"], Some(Coding::Gzip)),
        (&["deflate"], Some(Coding::Deflate)),
        (&[" br "], Some(Coding::Brotli)),
        (&["identity, zstd"], Some(Coding::Zstd)),
    ] {
        assert_eq!(Coding::of(&headers(values), true).unwrap(), coding, "{values:?}");
    }
}

#[test]
fn any_other_coding_is_415_and_says_what_is_taken() {
    for values in [&["compress"][..], &["gzip, br"], &["gzip", "gzip"], &["gzip;q=1"], &["aes128gcm"]] {
        let refusal = Coding::of(&headers(values), true).unwrap_err();
        assert_eq!(refusal.status(), 415, "{values:?}");
        assert!(
            refusal.message.contains("Content-Encoding") && refusal.message.contains(ACCEPTED),
            "{}",
            refusal.message
        );
        assert_eq!(refusal.header, Some(("accept-encoding", ACCEPTED)));
    }
    let refusal = Coding::of(&headers(&["gzip"]), false).unwrap_err();
    assert!(refusal.message.contains("limits.body_decoding"), "{}", refusal.message);
    assert_eq!(Coding::of(&headers(&["identity"]), false).unwrap(), None);
}
