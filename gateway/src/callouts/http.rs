//! HTTP calls.

use super::Callouts;
use super::destination::Destination;
use crate::trailers;
use crate::upstream::{Head, HeadBuilder, Link, STALE_WITHIN, Target, describe, read_trailers};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, header};
use pingora_core::ErrorType::InvalidHTTPHeader;
use pingora_core::OrErr as _;
use pingora_core::protocols::http::client::HttpSession;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turnstile_fleet::body::Pieces;
use turnstile_plugins::{HttpCallout, HttpReply};

/// Makes a call.
///
/// # Errors
/// In a few words why there is no answer.
pub(super) async fn call(
    callouts: &Callouts,
    destination: &Destination,
    mut callout: HttpCallout,
) -> Result<HttpReply, String> {
    callout.trailers = trailers::passing(callout.trailers);
    let most = destination.timeout();
    let limit = callout.timeout.map_or(most, |asked| asked.min(most));
    let exchange = async {
        let mut target = destination.target(callouts).await?;
        loop {
            let connected = callouts.connectors.connect(&target).await;
            let (mut link, reused) = connected.map_err(|error| describe(&error))?;
            link.watch_trailers();
            let started = Instant::now();
            let silent = match send(&mut link, &target, &callout, limit).await {
                Ok(()) => {
                    let mut session = link.into_session().ok_or("the connection is gone")?;
                    let head_only = callout.method == Method::HEAD;
                    let reply = receive(&mut session, callout.max_body, head_only).await;
                    // Its parser waits for the body that the head of such an answer speaks of.
                    if reply.is_ok() && !head_only {
                        callouts.connectors.release(&target, session).await;
                    } else {
                        session.shutdown().await;
                    }
                    return reply;
                }
                Err(reason) => reason,
            };
            // A pooled connection that turns out dead at once is replaced by a new one, once.
            if !reused || started.elapsed() >= STALE_WITHIN {
                return Err(silent);
            }
            target = Arc::new(target.fresh());
        }
    };
    match tokio::time::timeout(limit, exchange).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

fn request(target: &Target, callout: &HttpCallout) -> pingora_core::Result<Head> {
    let mut head = HeadBuilder::new(target, callout.method.as_str(), &callout.path, callout.headers.len() + 3)?;
    let authority = HeaderValue::from_str(&callout.authority);
    head.field(&header::HOST, &authority.or_err(InvalidHTTPHeader, "an authority that cannot stand in a header")?)?;
    for (name, value) in &callout.headers {
        head.field(name, value)?;
    }
    // A worker's key is the gateway's to send, and no plugin's to see.
    if let Some(authorization) = &target.authorization
        && !callout.headers.contains_key(header::AUTHORIZATION)
    {
        head.field(&header::AUTHORIZATION, authorization)?;
    }
    let bodiless = callout.body.is_empty() && (callout.method.is_safe() || callout.method == Method::DELETE);
    // With trailers the connection decides about the framing.
    if !bodiless && callout.trailers.is_empty() {
        head.field(&header::CONTENT_LENGTH, &HeaderValue::from(callout.body.len()))?;
    }
    Ok(head.finish())
}

/// Sends the request and waits for the head of its answer.
async fn send(link: &mut Link, target: &Target, callout: &HttpCallout, patience: Duration) -> Result<(), String> {
    let run = async {
        let head = request(target, callout)?;
        let session = if callout.trailers.is_empty() {
            link.send(target, &head, &Pieces::from(callout.body.clone()), patience).await?
        } else {
            link.send_with_trailers(target, &head, &callout.body, &callout.trailers, patience).await?
        };
        loop {
            session.read_response_header().await?;
            let status = session.response_header().map_or(0, |head| head.status.as_u16());
            if !(100..200).contains(&status) || status == 101 {
                return Ok(());
            }
        }
    };
    run.await.map_err(|error: Box<pingora_core::Error>| describe(&error))
}

/// Reads the rest. `head_only`: nothing follows the head, whatever it says.
async fn receive(session: &mut HttpSession, max_body: usize, head_only: bool) -> Result<HttpReply, String> {
    let head = session.response_header().ok_or("the answer has no head")?;
    let (status, headers) = (head.status, head.headers.clone());
    if head_only {
        return Ok(HttpReply { status, headers, body: Bytes::new(), trailers: HeaderMap::new() });
    }
    let mut body = BytesMut::new();
    loop {
        match session.read_response_body().await {
            Ok(Some(piece)) if body.len().saturating_add(piece.len()) > max_body => {
                return Err(format!("the body of the answer is larger than {max_body} bytes"));
            }
            Ok(Some(piece)) => body.extend_from_slice(&piece),
            Ok(None) => break,
            Err(error) => return Err(describe(&error)),
        }
    }
    let trailers = read_trailers(session).await.map_err(|error| describe(&error))?;
    Ok(HttpReply { status, headers, body: body.freeze(), trailers })
}
