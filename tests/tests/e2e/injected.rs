//! What plugins put into an answer, and what they ask for, outside of the callbacks of its own.

use crate::higress::{probe, said};
use turnstile_tests::harness::{
    Answer, CHAT, Flood, PluginText, Request, Rig, Scripted, Service, Setup, built_in, chat_stream, logs, until,
};

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
/// An event that others may follow.
const FIRST: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"}}]}\n\n";
/// All that a worker says.
const EVENT: &str = "data: {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"model\":\"sim\",\"choices\":[{\"index\":0,\
                     \"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// Keeps the context of the stream in `c`, and does something for it at the next tick.
fn at_a_tick(callback: &str, returned: &str, then: &str) -> String {
    format!(
        "on configure\n  - set_tick_period_milliseconds 20\non {callback}\n  let c $ctx\n  return {returned}\n\
         on tick\n  if $c > 0\n    - set_effective_context $c\n{then}    let c 0\n  end\n"
    )
}

async fn rig(worker: String, filters: Vec<PluginText>) -> Rig {
    logs();
    let all: Vec<PluginText> = filters.into_iter().chain(built_in()).collect();
    Setup::new().workers(0).external(worker).plugins(&all).start().await
}

async fn asked(rig: &Rig) -> Answer {
    rig.send(&Request::json(CHAT, &chat_stream("Hello"))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_piece_from_a_tick_goes_out_though_nothing_is_held_and_the_worker_says_no_more() {
    let worker = Scripted::start(format!("{HEAD}{:x}\r\n{FIRST}\r\n", FIRST.len())).await;
    let put_in = "    - inject_encoded_data_to_filter_chain \"data: [DONE]\\n\\n\" 1\n";
    let rig = rig(worker.url(), vec![probe("late-note", &at_a_tick("response_body", "continue", put_in))]).await;
    let answer = asked(&rig).await;
    assert_eq!((answer.status, answer.complete, answer.text()), (200, true, format!("{FIRST}data: [DONE]\n\n")));
    assert_eq!(rig.record_of(&answer).await["end"], "plugin_end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_closed_from_a_tick_ends_though_nothing_is_held() {
    let worker = Scripted::start(format!("{HEAD}{:x}\r\n{FIRST}\r\n", FIRST.len())).await;
    let closes = "    - close_stream response\n";
    let rig = rig(worker.url(), vec![probe("closes", &at_a_tick("response_body", "continue", closes))]).await;
    let answer = asked(&rig).await;
    assert_eq!((answer.status, answer.complete), (200, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_last_piece_that_waits_for_another_filter_is_not_lost_to_what_the_worker_says_meanwhile() {
    let worker = Flood::start().await;
    let service = Service::start().await;
    logs();
    // It lets nothing of the worker's pass, and ends the answer when it hears back.
    let blocks = "on response_body\n  let c $ctx\n  if $n == 0\n    let n 1\n    - http_call service \":method=GET; :path=/; \
                  :authority=a\" \"\" \"\" 10000\n  end\n  return 3\non http_call_response\n  - set_effective_context $c\n  \
                  - inject_encoded_data_to_filter_chain \"blocked\" 1\n";
    // It has the end of the answer wait for a reply.
    let audits = "on response_body\n  if $2 == 1\n    let c $ctx\n    - http_call service \":method=GET; :path=/hold; \
                  :authority=a\" \"\" \"\" 10000\n    return pause\n  end\non http_call_response\n  - set_effective_context $c\n  \
                  - continue_stream response\n";
    let filters = [probe("audits", audits), probe("blocks", blocks)].map(|p| p.key("upstreams = [\"service\"]"));
    let all: Vec<PluginText> = filters.into_iter().chain(built_in()).collect();
    let setup = Setup::new().workers(0).external(worker.url()).plugins(&all);
    let rig = setup.upstream("service", &service.url(), "").start().await;
    let mut waiting = rig.begin(&Request::json(CHAT, &chat_stream("Hello"))).await;
    until("the second call", async || service.calls().iter().any(|call| call.target == "GET /hold")).await;
    service.release();
    let answer = waiting.answer().await;
    assert_eq!((answer.status, answer.complete, answer.text().as_str()), (200, true, "blocked"));
    assert_eq!(rig.record_of(&answer).await["end"], "plugin_end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_ends_an_answer_late_waits_for_the_filters_that_stop_it() {
    // The last one lets go of the head with the first piece of the body; the one in the middle ends the answer there.
    let late = "on response_headers\n  return 1\n";
    let ends = "on response_headers\n  - replace_header_map_value response_headers :status 201\n  return 2\n";
    let body = "on response_headers\n  - add_header_map_value response_headers x-seen yes\n  return 1\n\
                on response_body\n  note body $1 $2\n";
    let waits = at_a_tick(
        "response_headers",
        "3",
        "    - add_header_map_value response_headers x-seen yes\n    - continue_stream response\n",
    );
    for (name, first) in [("late-body", body.to_owned()), ("late-tick", waits)] {
        for whole in [false, true] {
            let filters = vec![probe(name, &first), probe("ends", ends), probe("late", late)];
            let (flood, scripted);
            let worker = if whole {
                scripted = Scripted::start(format!("{HEAD}{:x}\r\n{EVENT}\r\n0\r\n\r\n", EVENT.len())).await;
                scripted.url()
            } else {
                flood = Flood::start().await;
                flood.url()
            };
            let rig = rig(worker, filters).await;
            let answer = asked(&rig).await;
            assert_eq!((answer.status, answer.complete, answer.text().as_str()), (201, true, ""), "{name} {whole}");
            assert_eq!(answer.header("x-seen"), Some("yes"), "{name} {whole}");
            assert_eq!(rig.record_of(&answer).await["status"], 201, "{name} {whole}");
        }
    }
    assert!(said("late-body").iter().all(|line| line == "> body 0 1") && said("late-body").len() == 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_filter_held_before_it_saw_it_is_shown_to_it_whatever_it_puts_in_front() {
    let worker = Scripted::start(format!("{HEAD}{:x}\r\n{EVENT}\r\n0\r\n\r\n", EVENT.len())).await;
    let late = "on response_headers\n  return 1\n";
    let masks = at_a_tick(
        "response_headers",
        "3",
        "    - inject_encoded_data_to_filter_chain \"<first>\" 0\n    - continue_stream response\n",
    ) + "on response_body\n  - set_buffer_bytes response_body 0 max \"<masked>\"\n";
    let rig = rig(worker.url(), vec![probe("masks", &masks), probe("late", late)]).await;
    let answer = asked(&rig).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    assert!(answer.text().starts_with("<first><masked>") && !answer.text().contains("Hi"), "{}", answer.text());
}
