//! The head of an answer on its way through the filters.

use super::{BodyPause, FilterRun, FilterVerdict, Side, Step, Stopped};
use crate::headers::{connection_listed, remove_hop_by_hop, response_head};
use http::header;
use pingora_http::ResponseHeader;
use std::sync::Arc;
use turnstile_plugins::{Body, Callback, ResponseMap};

impl FilterRun {
    /// The head of an answer. What the filters changed is written back to `head`. `end`: nothing follows it. `gone` resolves
    /// when the client has left.
    pub async fn response_headers(
        &mut self,
        head: &mut ResponseHeader,
        end: bool,
        gone: impl Future<Output = ()>,
    ) -> FilterVerdict {
        self.answered = true;
        self.ends_with_head = end;
        // An answer before this one, of which nothing was sent, may have broken off anywhere.
        (self.response_stopped, self.late_head) = (None, false);
        self.injected.clear();
        self.framing = head.headers.get(header::TRANSFER_ENCODING).cloned();
        let (status, shown) = (head.status, Arc::new(head.headers.clone()));
        self.env.response = Some(ResponseMap::new(status, Arc::clone(&shown)));
        tokio::pin!(gone);
        for at in (0..self.entered).rev() {
            let end = end || self.response_ended;
            let waits = match self.call(at, Side::Response, |s, env| s.on_response_headers(env, end)) {
                Step::Go => None,
                Step::Paused(BodyPause::GoesOn) if !end => {
                    self.response_stopped = Some(Stopped { at, all: false });
                    return FilterVerdict::Go;
                }
                Step::Paused(BodyPause::GoesOn) if self.waits_for_a_body(at, Callback::ResponseBody) => {
                    self.env.chunk = Body::default();
                    match self.call(at, Side::Response, |s, env| s.on_response_body(env, 0, true)) {
                        Step::Go => None,
                        Step::Paused(_) => self.wait(at, Side::Response, &mut gone).await,
                        Step::End(verdict) => Some(verdict),
                    }
                }
                Step::Paused(_) => self.wait(at, Side::Response, &mut gone).await,
                Step::End(verdict) => Some(verdict),
            };
            if let Some(verdict) = waits {
                return verdict;
            }
        }
        match &mut self.env.response {
            // Nobody has changed it.
            Some(map) if map.status == status && Arc::ptr_eq(&map.fields.fields, &shown) => {
                map.seal();
                // The body may still change, so no length holds.
                head.remove_header(&header::CONTENT_LENGTH);
            }
            _ => {
                if let Some(changed) = self.left_head() {
                    *head = changed;
                }
            }
        }
        FilterVerdict::Go
    }

    /// The head of an answer whose body is on its way, for the filters below one.
    pub(super) fn late_response_heads(&mut self, below: usize) -> Option<FilterVerdict> {
        self.late_head = true;
        for at in (0..below).rev() {
            let end = self.response_ended;
            let step = match self.call(at, Side::Response, |s, env| s.on_response_headers(env, end)) {
                Step::Paused(BodyPause::GoesOn) if end && self.waits_for_a_body(at, Callback::ResponseBody) => {
                    self.env.chunk = Body::default();
                    self.call(at, Side::Response, |s, env| s.on_response_body(env, 0, true))
                }
                step => step,
            };
            match step {
                Step::Go => {}
                Step::Paused(pause) => {
                    // Behind the end no body comes that it could wait for.
                    self.response_stopped = Some(Stopped { at, all: end || pause != BodyPause::GoesOn });
                    return None;
                }
                Step::End(verdict) => return Some(verdict),
            }
        }
        None
    }

    /// The head of the answer as all filters have left it; it cannot be changed after that.
    fn left_head(&mut self) -> Option<ResponseHeader> {
        let map = self.env.response.as_mut()?;
        let listed = connection_listed(&map.fields.fields);
        let mut changed = (*map.fields.fields).clone();
        // The body may still change, so no length holds; the connection, and with it the framing, is the gateway's.
        changed.remove(header::CONTENT_LENGTH);
        remove_hop_by_hop(&mut changed, &listed);
        if let Some(framing) = self.framing.clone() {
            changed.insert(header::TRANSFER_ENCODING, framing);
        }
        map.seal();
        Some(response_head(map.status, changed))
    }

    /// As [`FilterRun::left_head`], once, if the head has changed since it was first shown.
    pub fn changed_response_head(&mut self) -> Option<ResponseHeader> {
        if self.response_stopped.is_some() || !std::mem::take(&mut self.late_head) {
            return None;
        }
        self.left_head()
    }
}
