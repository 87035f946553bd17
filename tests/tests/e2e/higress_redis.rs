//! Redis calls of plugins made for Higress, to a real Redis server.

use crate::higress::{probe, said};
use turnstile_tests::harness::{Answer, CHAT, PluginText, RedisServer, Rig, Setup, built_in, chat, logs, until};

/// Runs a command for each request, shows the reply, and lets the request go on with it in `x-reply` of the answer.
fn program(init: &str, command: &str) -> String {
    format!(
        "on configure\n  {init}\non request_headers\n  let c $ctx\n  redis_call outbound|6379||redis.static {command} =t\n  \
         if $status != 0\n    return continue\n  end\n  return 4\n\
         on redis_call_response\n  note status $2 size $3\n  get_buffer_bytes redis_response 0 max\n  \
         - set_effective_context $c\n  - continue_stream request\n"
    )
}

fn resp(words: &[&str]) -> String {
    let words: String = words.iter().map(|word| format!("${}\\r\\n{word}\\r\\n", word.len())).collect();
    let count = words.matches("\\r\\n").count() / 2;
    format!("\"*{count}\\r\\n{words}\"")
}

async fn rig(name: &str, url: &str, keys: &str, program: &str, more: &str) -> Rig {
    logs();
    let plugin = probe(name, program).key("upstreams = [\"redis\"]").key(more);
    let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
    Setup::new().plugins(&all).upstream("redis", url, keys).start().await
}

async fn ask(rig: &Rig) -> Answer {
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_run_on_a_connection_that_is_kept() {
    let redis = RedisServer::start(&[]).await;
    let rig = rig("counter", &redis.url(), "", &program("", &resp(&["INCR", "n"])), "").await;
    for n in 1..=5 {
        ask(&rig).await;
        assert_eq!(
            said("counter").last().unwrap(),
            &format!("> get_buffer_bytes redis_response 0 max = OK :{n}\\x0d\\x0a")
        );
    }
    let info = redis.ask("INFO stats").await;
    // One of the gateway, one of this question.
    assert!(
        info.contains("total_connections_received:2\r\n") || info.contains("total_connections_received:3\r\n"),
        "{info}"
    );
    let labels = [("plugin", "counter"), ("upstream", "redis"), ("result", "ok")];
    assert_eq!(rig.metric("turnstile_plugin_callouts_total", &labels).await, 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_of_any_shape_come_as_they_are_on_the_wire() {
    let redis = RedisServer::start(&[]).await;
    let script = "return {1,'two',{false,string.char(13,10)},redis.error_reply('ODD no')}";
    let rig = rig("shapes", &redis.url(), "", &program("", &resp(&["EVAL", script, "0"])), "").await;
    ask(&rig).await;
    let got = said("shapes").pop().unwrap();
    let expected = "*4\\x0d\\x0a:1\\x0d\\x0a$3\\x0d\\x0atwo\\x0d\\x0a*2\\x0d\\x0a$-1\\x0d\\x0a$2\\x0d\\x0a\\x0d\\x0a\\x0d\\x0a-ODD no\\x0d\\x0a";
    assert!(got.ends_with(expected), "{got}");
}

#[tokio::test(flavor = "multi_thread")]
async fn login_and_database_are_the_upstreams_and_else_the_plugins() {
    let redis = RedisServer::start(&["--requirepass", "secret"]).await;
    let command = resp(&["INCR", "n"]);
    let by_plugin = "redis_init \"outbound|6379||redis.static?db=3\" \"\" secret 10000";
    let wrong = "redis_init \"redis?db=3\" \"\" wrong 10000";
    let cases = [
        ("by-plugin", "", "", by_plugin, ":1", 3),
        ("by-upstream", "/5", "password = \"secret\"", wrong, ":1", 5),
        ("again", "/5", "password = { file = \"password\" }\nusername = \"default\"", "", ":2", 5),
    ];
    for (name, database, keys, init, expected, number) in cases {
        logs();
        let plugin = probe(name, &program(init, &command)).key("upstreams = [\"redis\"]");
        let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
        let setup = Setup::new().plugins(&all).file("password", "secret\n");
        let rig = setup.upstream("redis", &format!("{}{database}", redis.url()), keys).start().await;
        ask(&rig).await;
        assert!(said(name).last().unwrap().contains(&format!("= OK {expected}")), "{:?}", said(name));
        let there = redis.ask(&format!("AUTH secret\r\nSELECT {number}\r\nGET n")).await;
        assert!(there.contains(&expected[1..]), "{there}");
        assert!(!rig.admin("/config").await.text().contains("secret\""), "the password is shown");
    }
    let rig = rig("refused", &redis.url(), "password = \"other\"", &program("", &command), "").await;
    ask(&rig).await;
    assert!(said("refused").contains(&"> status 1 size 0".to_owned()), "{:?}", said("refused"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_asked_for_a_login_serves_no_other_call() {
    let redis = RedisServer::start(&["--requirepass", "secret"]).await;
    let rig = rig("stranger", &redis.url(), "", &program("", &resp(&["PING"])), "").await;
    let connections = async || {
        let info = redis.ask("AUTH secret\r\nINFO stats").await;
        let (_, rest) = info.split_once("total_connections_received:").unwrap();
        rest.split("\r\n").next().unwrap().parse::<u32>().unwrap()
    };
    let before = connections().await;
    for _ in 0..3 {
        ask(&rig).await;
        assert!(said("stranger").last().unwrap().contains("= OK -NOAUTH"), "{:?}", said("stranger"));
    }
    // One of each call, one of the question.
    assert_eq!(connections().await - before, 3 + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_logs_in_by_so_many_names_and_no_more() {
    let redis = RedisServer::start(&[]).await;
    let name = |port: usize| format!("redis_init outbound|{port}||redis.static \"\" \"\" 1000");
    let inits: Vec<String> = (1..=65).chain([64, 1]).map(name).collect();
    let rig = rig("names", &redis.url(), "", &program(&inits.join("\n  "), &resp(&["PING"])), "").await;
    let said: Vec<String> = said("names").into_iter().filter(|line| line.contains("redis_init")).take(67).collect();
    let refused: Vec<usize> = (0..67).filter(|at| !said[*at].ends_with("= OK")).collect();
    assert_eq!(refused, [64], "{:?}", said.get(60..));
    ask(&rig).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_is_told_as_a_status_and_found_again() {
    let mut redis = RedisServer::start(&[]).await;
    let rig = rig("gone", &redis.url(), "connect_ms = 500", &program("", &resp(&["PING"])), "").await;
    let last = || said("gone").into_iter().rfind(|line| line.contains("status")).unwrap();
    ask(&rig).await;
    assert_eq!(last(), "> status 0 size 7");
    redis.stop().await;
    ask(&rig).await;
    assert_eq!(last(), "> status 1 size 0");
    redis.run().await;
    until("the gateway to reach it again", async || {
        ask(&rig).await;
        last() == "> status 0 size 7"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_and_large_replies_end_in_time_and_within_bounds() {
    let redis = RedisServer::start(&[]).await;
    let slow = program("redis_init redis \"\" \"\" 100", &resp(&["BLPOP", "nothing", "0"]));
    let rig_of_slow = rig("slow", &redis.url(), "", &slow, "").await;
    ask(&rig_of_slow).await;
    assert!(said("slow").contains(&"> status 1 size 0".to_owned()), "{:?}", said("slow"));
    let large = program("", &resp(&["EVAL", "return string.rep('x',100000)", "0"]));
    let rig_of_large = rig("large", &redis.url(), "", &large, "call_body_bytes = 65536").await;
    ask(&rig_of_large).await;
    assert!(said("large").contains(&"> status 1 size 0".to_owned()), "{:?}", said("large"));
    // The connection with the rest of it serves nobody else.
    ask(&rig_of_large).await;
    assert_eq!(said("large").iter().filter(|line| *line == "> status 1 size 0").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_not_granted_is_not_called() {
    let redis = RedisServer::start(&[]).await;
    logs();
    let plugin = probe("ungranted", &program("", &resp(&["INCR", "n"])));
    let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
    let rig = Setup::new().plugins(&all).upstream("redis", &redis.url(), "").start().await;
    ask(&rig).await;
    assert!(said("ungranted").last().unwrap().ends_with("= BAD_ARGUMENT"), "{:?}", said("ungranted"));
    assert!(redis.ask("EXISTS n").await.contains(":0"));
}
