//! The story: one agent's conversation, act by act. Every act plays, prints what was decided, and checks what it says.

use crate::account::{Account, Record};
use crate::client::{Answer, Turn};
use crate::stage::{ROWS, Stage, WORKERS};
use serde_json::{Value, json};

/// The lead agent's session.
const LEAD: &str = "lead-agent";
/// The session of its sub-agent.
const SUB: &str = "lead-agent/search";

/// What is remembered from act to act.
pub struct Story<'a> {
    stage: &'a Stage,
    account: &'a mut Account,
    messages: Vec<Value>,
    lead: Vec<Record>,
    explained: Vec<(&'static str, Answer)>,
}

type Outcome = Result<(), String>;

impl<'a> Story<'a> {
    /// Nothing has happened.
    pub fn new(stage: &'a Stage, account: &'a mut Account) -> Self {
        let system = json!({"role": "system", "content": "You mend programs. Read, change, test. Say what you did. ".repeat(12)});
        Self { stage, account, messages: vec![system], lead: Vec::new(), explained: Vec::new() }
    }

    /// Plays all acts.
    ///
    /// # Errors
    /// Something did not happen at all; what happened otherwise than claimed is in the account.
    pub async fn play(mut self) -> Outcome {
        self.open_and_grow().await?;
        self.sub_agent().await?;
        self.speculative_prefill().await?;
        self.overtake().await?;
        self.close().await?;
        self.side_requests();
        self.explain();
        Ok(())
    }

    /// The lead agent's next turn.
    fn lead_turn(&mut self, words: &str, nvext: Value) -> Turn {
        self.messages.push(json!({"role": "user", "content": words}));
        let mut session = nvext;
        session["session_control"]["session_id"] = LEAD.into();
        let body = json!({
            "model": "sim", "stream": true, "messages": self.messages, "tools": tools(), "nvext": session,
        });
        Turn { name: format!("lead-{}", self.lead.len() + 1), body, headers: Vec::new() }
    }

    fn lead_said(&mut self, answer: &Answer, record: Record) {
        self.messages.push(answer.message());
        self.lead.push(record);
    }

    async fn open_and_grow(&mut self) -> Outcome {
        for (words, control) in [
            (
                "The build fails since this morning. Find out why. [[sim:tokens=40]]",
                json!({"action": "open", "timeout": 300}),
            ),
            ("Show me the lines in question. [[sim:tokens=32]]", json!({})),
            ("Now look at who calls it. [[sim:tokens=48]]", json!({})),
        ] {
            let turn = self.lead_turn(words, json!({"session_control": control, "agent_hints": {"osl": 64}}));
            let (answer, record) = self.stage.turn(&turn).await?;
            self.lead_said(&answer, record);
            match self.lead.len() {
                1 => self.explained.push(("placed", answer)),
                2 => self.explained.push(("bound", answer)),
                _ => {}
            }
        }
        let account = &mut *self.account;
        account.line(
            "1. The lead agent opens a session (nvext.session_control), and its history grows from turn to turn.",
        );
        account.decisions_head();
        self.lead.iter().for_each(|record| account.decision(record));
        let home = self.lead.first().map(|r| r.text("worker").to_owned()).unwrap_or_default();
        let stays = self.lead.iter().all(|r| r.text("worker") == home && r.text("session_mode") == "tag");
        account.claim(stays, "every turn went to the worker of the first one, in a tagged session", || home.clone());
        let cached: Vec<u64> = self.lead.iter().map(|r| r.number("cached_tokens")).collect();
        account
            .claim(cached.is_sorted_by(|a, b| a < b), "cached tokens grow with every turn", || format!("{cached:?}"));
        let bodies: Vec<Value> = self.lead.iter().map(|r| self.stage.body_of(r)).collect();
        let tag = bodies.first().and_then(|b| b.get("session_id")).cloned().unwrap_or_default();
        let tagged = tag.is_string() && bodies.iter().all(|b| b.get("session_id") == Some(&tag));
        account.claim(
            tagged && bodies.iter().all(|b| b.get("nvext").is_none()),
            "the worker got its own session_id with every turn, and never nvext",
            || format!("session_id {tag}"),
        );
        account.line("");
        Ok(())
    }

    /// The lead's turn is still streaming when the sub-agent begins, and streams on when it has ended.
    async fn sub_agent(&mut self) -> Outcome {
        // Eight seconds, so that the sub-agent is done before it on a busy machine as well.
        let turn = self.lead_turn("Ask a sub-agent to search, and go on. [[sim:tokens=1300]]", json!({}));
        let mut stream = self.stage.begin(&turn).await?;
        while !stream.has_text() && stream.more().await? {}
        let mut subs = Vec::new();
        for (name, words, last) in [("search-1", "Find every use of parse_header. [[sim:tokens=12]]", false)] {
            let turn = sub_turn(name, words, last);
            subs.push(self.stage.turn(&turn).await?.1);
        }
        let (answer, record) = self.stage.end(&turn, stream).await?;
        self.lead_said(&answer, record.clone());

        let account = &mut *self.account;
        account.line("2. A sub-agent works beside it (x-dynamo-session-id, x-dynamo-parent-session-id).");
        account.decisions_head();
        account.decision(&record);
        subs.iter().for_each(|record| account.decision(record));
        let sub = subs.first().cloned().unwrap_or(Record(Value::Null));
        let beside = sub.number("ts") >= record.number("ts") && sub.ended_at() <= record.ended_at();
        account.claim(beside, "it ran from start to end while the lead agent's answer streamed", || {
            format!(
                "{} + {} ms within {} + {} ms",
                sub.number("ts"),
                sub.0["total_ms"],
                record.number("ts"),
                record.0["total_ms"]
            )
        });
        let kin = sub.text("session") != record.text("session") && sub.text("tree") == record.text("tree");
        account.claim(kin, "its session is another one, in the lead agent's tree", || {
            format!("session {}, tree {}, lead's {}", sub.text("session"), sub.text("tree"), record.text("tree"))
        });
        let own = self.stage.body_of(&sub).get("session_id").cloned().unwrap_or_default();
        let other = self.stage.body_of(&record).get("session_id").cloned().unwrap_or_default();
        account.claim(own.is_string() && own != other, "its worker got a session_id of its own", || {
            format!("{own}, {other}")
        });
        account.line("");
        Ok(())
    }

    async fn speculative_prefill(&mut self) -> Outcome {
        let hints = json!({"agent_hints": {"speculative_prefill": true}});
        let words = "Run the tests. [[sim:tokens=60]] [[sim:tool=run_tests {\"path\": \"tests/\"}]]";
        let turn = self.lead_turn(words, hints);
        let (answer, asked) = self.stage.turn(&turn).await?;
        self.lead_said(&answer, asked.clone());
        let done = "turnstile_side_requests_total{kind=\"prefill\",result=\"ok\"} 1";
        self.stage
            .until("the speculative prefill", async || {
                self.stage.admin_text("metrics").await?.lines().any(|line| line == done).then_some(())
            })
            .await?;
        let id = answer.tool_calls.first().map(|[id, ..]| id.clone()).unwrap_or_default();
        self.messages.push(
            json!({"role": "tool", "tool_call_id": id, "content": "3 failed: header_empty, header_long, header_twice"}),
        );
        let turn = self.lead_turn("Mend the first of them. [[sim:tokens=24]]", json!({}));
        let (said, warmed) = self.stage.turn(&turn).await?;
        self.lead_said(&said, warmed.clone());

        let account = &mut *self.account;
        account.line(
            "3. A turn ends in a tool call and asked for a speculative prefill: while the tool runs, the gateway sends",
        );
        account.line(
            "   the history with the answer to the same worker. (The template drops old reasoning, so without that the",
        );
        account.line(
            "   engine can reuse nothing of an answer: see how little turns 2 to 5 have beyond the prompt before.)",
        );
        account.decisions_head();
        account.decision(&asked);
        account.decision(&warmed);
        let beyond = |place: usize| {
            let before = self.lead.get(place.saturating_sub(1)).map_or(0, |r| r.number("prompt_tokens"));
            self.lead.get(place).map_or(0, |r| r.number("cached_tokens")) as i64 - before as i64
        };
        let cold: Vec<i64> = (1..5).map(beyond).collect();
        let warm = beyond(5);
        account.line(format!("   cached beyond the prompt before: {cold:?} without, {warm:+} with the prefill"));
        account.claim(answer.finish_reason == "tool_calls", "the first of the two ended in a tool call", || {
            answer.finish_reason.clone()
        });
        let prefills = self.stage.received(is_prefill);
        let home = prefills.iter().all(|p| format!("sim-{}", p.worker) == asked.text("worker"));
        account.claim(prefills.len() == 1 && home, "one prefill reached the worker that had served the turn", || {
            format!("{} of them", prefills.len())
        });
        let best = cold.iter().copied().max().unwrap_or(0);
        account.claim(warm >= best + 32, "with it, the next turn found the answer cached as well", || {
            format!("{warm} beside {cold:?}")
        });
        account.line("");
        Ok(())
    }

    /// Every row is taken; three ordinary turns wait; then an urgent one comes. One place comes free when a client leaves, and
    /// whoever gets it gives it to the next.
    async fn overtake(&mut self) -> Outcome {
        let stage = self.stage;
        let rows = ROWS * WORKERS;
        let long: Vec<Turn> = (1..=rows).map(|place| plain_turn(&format!("long-{place}"), 4000, None)).collect();
        let mut streams = futures::future::try_join_all(long.iter().map(|turn| stage.begin(turn))).await?;
        let urgent = plain_turn("urgent", 8, Some(10));
        let waiting: Vec<Turn> = (1..=3).map(|place| plain_turn(&format!("ordinary-{place}"), 8, None)).collect();
        // Each arrives when those before it wait.
        let arrive = async |place: u64, turn: &Turn| -> Result<Answer, String> {
            stage.until("the turns before to wait", async || (stage.queued().await? >= place).then_some(())).await?;
            stage.begin(turn).await?.finish().await
        };
        let leave = async {
            stage.until("four turns to wait", async || (stage.queued().await? >= 4).then_some(())).await?;
            drop(streams.pop());
            Ok(())
        };
        let [first, second, third] = waiting.as_slice() else { return Err("three turns were meant to wait".into()) };
        let (.., answer, ()) =
            tokio::try_join!(arrive(0, first), arrive(1, second), arrive(2, third), arrive(3, &urgent), leave)?;
        drop(streams);
        for turn in &long {
            stage.record(&turn.name).await?;
        }
        let jumped = stage.record("urgent").await?;
        let mut ordinary = Vec::new();
        for turn in &waiting {
            ordinary.push(stage.record(&turn.name).await?);
        }
        self.explained.push(("queued", answer));

        let account = &mut *self.account;
        account.line(format!(
            "4. All {rows} rows of the fleet are taken, three turns of priority 0 wait; then one of priority 10 comes."
        ));
        account.decisions_head();
        let mut order: Vec<&Record> = ordinary.iter().chain([&jumped]).collect();
        order.sort_by_key(|record| stage.place_of(record));
        order.iter().for_each(|record| account.decision(record));
        let waited = ordinary.iter().chain([&jumped]).all(|r| r.number("queue_ms") > 0);
        account.claim(waited, "all four waited in the gateway's queue", || "one did not".into());
        let last_to_come = ordinary.iter().all(|r| r.number("ts") <= jumped.number("ts"));
        // The place that came free is one worker's, which got them in the order in which they left.
        let worker = jumped.text("worker");
        let left = |r: &Record| stage.place_of(r).filter(|_| r.text("worker") == worker);
        let (first, others) = (left(&jumped), ordinary.iter().map(left).collect::<Vec<_>>());
        let all_left = first.is_some() && others.iter().all(Option::is_some);
        let first_to_go = all_left && others.iter().all(|other| *other > first);
        account.claim(last_to_come && first_to_go, "the urgent one came last and left first", || {
            let show = |r: &Record| {
                format!("{} came {} left {:?} to {}", r.text("request_id"), r.number("ts"), left(r), r.text("worker"))
            };
            ordinary.iter().chain([&jumped]).map(show).collect::<Vec<_>>().join(", ")
        });
        let in_order = all_left && others.is_sorted();
        account.claim(in_order, "the others left in the order in which they came", || format!("{others:?}"));
        let body = stage.body_of(&jumped);
        account.claim(
            body.get("priority") == Some(&10.into()),
            "its worker got priority 10, signed as the client gave it",
            || format!("{:?}", body.get("priority")),
        );
        account.line("");
        Ok(())
    }

    async fn close(&mut self) -> Outcome {
        let turn =
            self.lead_turn("Thank you. Sum up. [[sim:tokens=300]]", json!({"session_control": {"action": "close"}}));
        let mut stream = self.stage.begin(&turn).await?;
        let mut looks = Vec::new();
        while stream.more().await? {
            looks.push((stream.events(), self.stage.closes().len()));
        }
        let (answer, record) = self.stage.end(&turn, stream).await?;
        // A client that reads late may see the close before it has read all, but not while half of the answer is to come.
        looks.retain(|(events, _)| events * 2 < answer.events);
        let early: usize = looks.iter().map(|(_, closes)| closes).sum();
        let sub_turn = sub_turn("search-2", "Anything else? [[sim:tokens=8]]", true);
        let (_, sub) = self.stage.turn(&sub_turn).await?;
        self.stage.until("both closes", async || (self.stage.closes().len() >= 2).then_some(())).await?;

        let account = &mut *self.account;
        account.line("5. Both sessions end: the lead agent's by nvext.session_control, the sub-agent's by x-dynamo-session-final.");
        account.decisions_head();
        account.decision(&record);
        account.decision(&sub);
        let closes = self.stage.closes();
        account.claim(early == 0 && !looks.is_empty(), "no close_session while the answer streamed", || {
            format!("{early} seen in {} looks", looks.len())
        });
        let closed = |record: &Record| {
            let tag = self.stage.body_of(record).get("session_id").cloned();
            let hits = closes.iter().filter(|c| c.request.json().get("session_id") == tag.as_ref());
            hits.filter(|c| format!("sim-{}", c.worker) == record.text("worker")).count()
        };
        let counts = (closed(&record), closed(&sub), closes.len());
        account.claim(
            counts == (1, 1, 2),
            "after it, each session was closed once, on the worker that held it",
            || format!("{counts:?}"),
        );
        account.line("");
        Ok(())
    }

    fn side_requests(&mut self) {
        self.account.line("Side requests, as the workers received them");
        let side = self.stage.received(|r| is_prefill(r) || r.method == "POST" && !r.path.starts_with("/v1/"));
        for received in &side {
            let body = received.request.json();
            let told = if is_prefill(&received.request) {
                let messages = body.get("messages").and_then(Value::as_array).map_or(0, Vec::len);
                format!("{messages} messages, max_tokens {}, priority {}", body["max_tokens"], body["priority"])
            } else {
                body.to_string()
            };
            self.account.line(format!("   sim-{}  POST {:<22} {told}", received.worker, received.request.path));
        }
        self.account.line("");
    }

    fn explain(&mut self) {
        self.account.line("What the client sees with x-turnstile-explain: 1 (x-turnstile-…)");
        for (what, answer) in &self.explained {
            let shown: Vec<String> = answer
                .explained
                .iter()
                .map(|(name, value)| format!("{}: {value}", name.trim_start_matches("x-turnstile-")))
                .collect();
            self.account.line(format!("   {what:<7} {}", shown.join(", ")));
        }
        let told = |place: usize, name: &str| {
            let answer = self.explained.get(place).map(|(_, answer)| answer);
            answer.and_then(|a| a.explained.get(name)).cloned().unwrap_or_default()
        };
        let queued = told(2, "x-turnstile-queue-wait-ms").parse::<u64>().unwrap_or(0);
        let bound = told(1, "x-turnstile-worker");
        let same = !bound.is_empty() && bound == told(0, "x-turnstile-worker");
        self.account.claim(
            queued > 0 && same,
            "the queued one says how long, the bound one names the first one's worker",
            || format!("{queued} ms, {bound}"),
        );
        self.account.line("");
    }
}

fn is_prefill(request: &turnstile_sim::Recorded) -> bool {
    let body = request.json();
    request.path == "/v1/chat/completions"
        && body.get("max_tokens") == Some(&1.into())
        && body.get("stream") == Some(&false.into())
}

fn tools() -> Value {
    json!([{"type": "function", "function": {
        "name": "run_tests", "description": "Runs the tests under a path.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }}])
}

/// A turn of the sub-agent, which speaks the header form.
fn sub_turn(name: &str, words: &str, last: bool) -> Turn {
    let messages = json!([
        {"role": "system", "content": "You search. Answer with file and line, nothing else. ".repeat(8)},
        {"role": "user", "content": words},
    ]);
    let mut headers = vec![("x-dynamo-session-id", SUB.to_owned()), ("x-dynamo-parent-session-id", LEAD.to_owned())];
    let mut body = json!({"model": "sim", "stream": true, "messages": messages});
    if last {
        headers.push(("x-dynamo-session-final", "true".to_owned()));
    } else {
        body["nvext"] = json!({"session_control": {"session_id": SUB, "action": "open"}});
    }
    Turn { name: name.to_owned(), body, headers }
}

/// A turn of somebody else, without a session.
fn plain_turn(name: &str, tokens: usize, priority: Option<i32>) -> Turn {
    let words = format!("{name}: write {tokens} tokens. [[sim:think=0]] [[sim:tokens={tokens}]]");
    let mut body = json!({"model": "sim", "stream": true, "messages": [{"role": "user", "content": words}]});
    if let Some(priority) = priority {
        body["nvext"] = json!({"agent_hints": {"priority": priority}});
    }
    Turn { name: name.to_owned(), body, headers: Vec::new() }
}
