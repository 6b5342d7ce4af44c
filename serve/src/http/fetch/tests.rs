//! Fetches against a server of this machine, which only these tests permit.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::*;

/// The only address that is permitted here; the rest of this machine stands for what must not be reached.
const PERMITTED: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const FORBIDDEN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A server that answers every connection with the same bytes, given piece by piece.
fn server(pieces: impl Iterator<Item = Vec<u8>> + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind((PERMITTED, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, pieces) = (stream.unwrap(), pieces.clone());
            thread::spawn(move || {
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                    request.push(byte[0]);
                }
                // The client may hang up on what it does not want.
                let _ = pieces.into_iter().try_for_each(|piece| stream.write_all(&piece));
            });
        }
    });
    port
}

fn says(answer: impl Into<Vec<u8>>) -> u16 {
    server(std::iter::once(answer.into()))
}

fn redirects(location: &str) -> u16 {
    says(format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n"))
}

fn fetcher() -> Fetcher {
    let resolve = |name: &str, port| {
        Ok(match name {
            "permitted.test" => vec![SocketAddr::new(PERMITTED, port)],
            "forbidden.test" => vec![SocketAddr::new(FORBIDDEN, port)],
            "both.test" => vec![SocketAddr::new(PERMITTED, port), SocketAddr::new(FORBIDDEN, port)],
            _ => return Err(io::ErrorKind::NotFound.into()),
        })
    };
    Fetcher::with(Arc::new(resolve), |address| address == PERMITTED, 1000)
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn fetch(address: &str) -> Result<Vec<u8>, String> {
    run(async { fetcher().fetch(address, soon(), |_| true).await })
}

fn refusal(address: &str) -> String {
    fetch(address).expect_err(address)
}

#[test]
fn bodies_come_whole() {
    let sized = says("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello");
    let chunked =
        says("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n");
    let closed = says("HTTP/1.0 200 OK\r\n\r\nhello");
    for port in [sized, chunked, closed] {
        assert_eq!(fetch(&format!("http://permitted.test:{port}/a.png")).unwrap(), b"hello");
        assert_eq!(fetch(&format!("http://127.0.0.1:{port}/a.png")).unwrap(), b"hello");
    }
}

#[test]
fn redirects_are_followed_and_checked() {
    let end = says("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello");
    let one = redirects(&format!("http://permitted.test:{end}/x"));
    let two = redirects(&format!("//permitted.test:{one}/x"));
    let three = redirects(&format!("http://127.0.0.1:{two}/x"));
    let four = redirects(&format!("http://permitted.test:{three}/x"));
    assert_eq!(fetch(&format!("http://permitted.test:{three}/")).unwrap(), b"hello");
    assert!(refusal(&format!("http://permitted.test:{four}/")).contains("more than 3"));
    for (location, clause) in [
        (format!("http://forbidden.test:{end}/"), "not public"),
        (format!("http://127.0.0.2:{end}/"), "not public"),
        (format!("http://[::1]:{end}/"), "not public"),
        ("http://169.254.169.254/latest/meta-data/".into(), "not public"),
        ("file:///etc/passwd".into(), "leads to"),
        ("https://permitted.test/".into(), "https"),
        (format!("http://user@permitted.test:{end}/"), "user name"),
    ] {
        let port = redirects(&location);
        let clause_found = refusal(&format!("http://permitted.test:{port}/"));
        assert!(clause_found.contains(clause), "{location}: {clause_found}");
    }
    let nowhere = says("HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n");
    assert!(refusal(&format!("http://permitted.test:{nowhere}/")).contains("nowhere"));
}

#[test]
fn what_is_not_permitted_is_never_connected_to() {
    let listener = TcpListener::bind((FORBIDDEN, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    for host in ["forbidden.test", "both.test", "127.0.0.2"] {
        assert!(refusal(&format!("http://{host}:{port}/")).contains("not public"), "{host}");
    }
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    assert!(refusal("http://unknown.test/").contains("cannot be found"));
}

#[test]
fn the_system_resolves_old_forms_of_loopback_and_they_are_refused() {
    let fetcher = Fetcher::new(1000);
    let addresses = [
        "127.0.0.1:1",
        "[::1]:1",
        "[::ffff:127.0.0.1]",
        "localhost",
        "2130706433",
        "0x7f.1",
        "127.1",
        "0",
        "017700000001",
    ];
    for host in addresses {
        let clause =
            run(async { fetcher.fetch(&format!("http://{host}/"), soon(), |_| true).await }).expect_err(host);
        // Where the system does not know the old forms, they are names that nobody has.
        assert!(clause.contains("not public") || clause.contains("cannot be found"), "{host}: {clause}");
    }
    for host in
        ["127.0.0.1:1", "[::1]:1", "169.254.169.254", "10.0.0.1", "100.100.100.200", "[fd00:ec2::254]"]
    {
        let clause =
            run(async { fetcher.fetch(&format!("http://{host}/"), soon(), |_| true).await }).expect_err(host);
        assert!(clause.contains("not public"), "{host}: {clause}");
    }
}

#[test]
fn bodies_end_at_the_limit() {
    let announced = says("HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n");
    assert!(refusal(&format!("http://permitted.test:{announced}/")).contains("larger than 1000"));
    let head = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    let endless = server(std::iter::once(head).chain(std::iter::repeat_n(vec![b'x'; 100], 1_000_000)));
    assert!(refusal(&format!("http://permitted.test:{endless}/")).contains("larger than 1000"));
    let exact = says(format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(1000)));
    assert_eq!(fetch(&format!("http://permitted.test:{exact}/")).unwrap().len(), 1000);
    let heads = says(format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(1 << 20)));
    assert!(refusal(&format!("http://permitted.test:{heads}/")).contains("HTTP"));
}

#[test]
fn slow_answers_end_in_time() {
    let pieces = (0..10_000).map(|at| {
        if at > 0 {
            thread::sleep(Duration::from_millis(20));
        }
        if at == 0 { b"HTTP/1.1 200 OK\r\n\r\n".to_vec() } else { b"x".to_vec() }
    });
    let slow = server(pieces);
    let silent = server(std::iter::once_with(|| {
        thread::sleep(Duration::from_secs(20));
        Vec::new()
    }));
    for port in [slow, silent] {
        let start = Instant::now();
        let address = format!("http://permitted.test:{port}/");
        let clause =
            run(async { fetcher().fetch(&address, start + Duration::from_millis(300), |_| true).await });
        assert_eq!(clause.unwrap_err(), "was not fetched in time");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn only_plain_success_counts() {
    for (answer, clause) in [
        ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status 404"),
        ("HTTP/1.1 206 Partial Content\r\ncontent-length: 1\r\n\r\nx", "status 206"),
        ("HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", "status 500"),
        ("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", "compressed"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "in part"),
        ("SSH-2.0-OpenSSH_9.6\r\n", "HTTP"),
        ("", "HTTP"),
    ] {
        let port = says(answer);
        let found = refusal(&format!("http://permitted.test:{port}/"));
        assert!(found.contains(clause), "{answer:?}: {found}");
    }
    let nobody = TcpListener::bind((PERMITTED, 0)).unwrap().local_addr().unwrap().port();
    assert!(refusal(&format!("http://permitted.test:{nobody}/")).contains("does not answer"));
}

#[test]
fn room_is_asked_for_piece_by_piece() {
    let port = says(format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(900)));
    let counted = AtomicUsize::new(0);
    let grow = |bytes| counted.fetch_add(bytes, Ordering::Relaxed) + bytes <= 900;
    let address = format!("http://permitted.test:{port}/");
    assert_eq!(run(async { fetcher().fetch(&address, soon(), grow).await }).unwrap().len(), 900);
    assert_eq!(counted.load(Ordering::Relaxed), 900);
    let clause = run(async { fetcher().fetch(&address, soon(), |_| false).await }).unwrap_err();
    assert!(clause.contains("no room"), "{clause}");
}
