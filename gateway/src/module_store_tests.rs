#![allow(clippy::unwrap_used)]

use super::*;
use parking_lot::Mutex;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

/// A file server in a thread: answers by path, notes what was asked, ends with its last handle.
struct Files {
    base: Url,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Files {
    fn serve(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let note = Arc::downgrade(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Some(asked) = note.upgrade() else { return };
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
                let line = lines.next().unwrap();
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                assert!(head.iter().any(|line| line.eq_ignore_ascii_case("accept-encoding: identity")), "{head:?}");
                let path = line.split(' ').nth(1).unwrap().to_owned();
                let answer = answer(&path);
                // Noted before the client can have its answer and look.
                asked.lock().push(path);
                // Whoever has read enough closes early.
                let _ = stream.write_all(&answer);
            }
        });
        Self { base, asked }
    }

    fn url(&self, path: &str) -> Url {
        self.base.join(path).unwrap()
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
    }
}

fn ok(body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

fn redirect(to: &str) -> Vec<u8> {
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n").into_bytes()
}

#[test]
fn a_module_is_fetched_once_and_kept_by_its_digest() {
    let files = Files::serve(|path| match path {
        "/latest?arch=wasm" => redirect("/store/1"),
        "/store/1" => redirect("2"),
        "/store/2" => ok(b"the module"),
        _ => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
    });
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("modules");
    let sha256 = digest(b"the module");
    let url = files.url("latest?arch=wasm");
    let fetched = ModuleStore::open(Some(&dir)).get(&url, &sha256).unwrap();
    assert_eq!(&*fetched, b"the module");
    assert_eq!(files.asked(), ["/latest?arch=wasm", "/store/1", "/store/2"]);
    // Kept over a restart; the URL does not matter for it.
    let store = ModuleStore::open(Some(&dir));
    assert_eq!(&*store.get(&files.url("elsewhere"), &sha256).unwrap(), b"the module");
    assert_eq!(files.asked().len(), 3);
    // What is not what its name says is fetched again.
    fs::write(dir.join(format!("{sha256}.wasm")), b"another").unwrap();
    assert_eq!(&*store.get(&url, &sha256).unwrap(), b"the module");
    assert_eq!(files.asked().len(), 6);
    assert!(store.get(&files.url("none"), &digest(b"none")).unwrap_err().contains("answered 404"));
    // Without a directory nothing is kept.
    let without = ModuleStore::default();
    without.get(&url, &sha256).unwrap();
    without.get(&url, &sha256).unwrap();
    assert_eq!(files.asked().len(), 13);
}

#[test]
fn what_has_another_digest_is_not_taken_nor_kept() {
    let files = Files::serve(|_| ok(b"another"));
    let parent = tempfile::tempdir().unwrap();
    let store = ModuleStore::open(Some(parent.path()));
    let (wanted, found) = (digest(b"the module"), digest(b"another"));
    let error = ModuleStore::open(Some(parent.path())).get(&files.url("a"), &wanted).unwrap_err();
    assert!(error.contains(&wanted) && error.contains(&found), "{error}");
    assert!(store.kept(&wanted).is_none() && store.kept(&found).is_none());
}

#[test]
fn bounds_hold() {
    let loops = Files::serve(|_| redirect("/again"));
    let store = ModuleStore::default();
    let error = |url: &Url| store.get(url, &digest(b"x")).unwrap_err();
    assert!(error(&loops.url("a")).contains("more than 5 redirects"));
    assert_eq!(loops.asked().len(), MAX_REDIRECTS + 1);
    let away = Files::serve(|_| redirect("file:///etc/passwd"));
    assert!(error(&away.url("a")).contains("redirects to no URL of http or https"));
    let large = Files::serve(|_| {
        let mut head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for _ in 0..65 {
            head.extend_from_slice(b"100000\r\n");
            head.resize(head.len() + 0x10_0000, 0);
            head.extend_from_slice(b"\r\n");
        }
        head
    });
    assert!(error(&large.url("a")).contains("is larger than 64 MiB"));
    // Held and not listened on, so that nobody else can have the port.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let refused = error(&format!("http://{}/a.wasm", closed.local_addr().unwrap()).parse().unwrap());
    assert!(refused.to_lowercase().contains("connect"), "{refused}");
}

#[test]
fn old_modules_make_room() {
    let files = Files::serve(|path| ok(path.as_bytes()));
    let parent = tempfile::tempdir().unwrap();
    let store = ModuleStore::open(Some(&parent.path().join("m")));
    for n in 0..MAX_MODULES + 3 {
        let path = format!("/{n}");
        store.get(&files.url(&path), &digest(path.as_bytes())).unwrap();
    }
    assert_eq!(fs::read_dir(parent.path().join("m")).unwrap().count(), MAX_MODULES);
}
