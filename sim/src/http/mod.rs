//! The HTTP face: routes, keys, faults, and one module for each family of endpoints.

mod chat;
mod completions;
mod control;
mod fields;
mod generate;
mod info;
mod messages;
mod pieces;
mod reply;
mod responses;
mod sessions;
mod validate;

pub(crate) use reply::{Body, holding};

use crate::{fault::FaultKind, server::Shared};
use bytes::Bytes;
use hyper::{Method, Response, StatusCode, header, http::request::Parts};
use std::{io, sync::Arc};

/// How much of a key a route asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Open,
    Normal,
    Admin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Route {
    Chat,
    Completions,
    Generate,
    Responses,
    ResponseById,
    Messages,
    CountTokens,
    Embedding,
    Score,
    Models,
    ModelById,
    Tokenize,
    Detokenize,
    Health,
    Ready,
    Ping,
    ModelInfo,
    ServerInfo,
    Loads,
    OpenSession,
    CloseSession,
    Abort,
    Flush,
    Pause,
    Continue,
    Root,
}

const GET: &[Method] = &[Method::GET];
const POST: &[Method] = &[Method::POST];
const GET_POST: &[Method] = &[Method::GET, Method::POST];

/// The route of a path, its methods and its level.
fn route(path: &str) -> Option<(Route, &'static [Method], Level)> {
    use Level::{Admin, Normal, Open};
    Some(match path {
        "/v1/chat/completions" | "/invocations" => (Route::Chat, POST, Normal),
        "/v1/completions" => (Route::Completions, POST, Normal),
        "/generate" => (Route::Generate, &[Method::POST, Method::PUT], Normal),
        "/v1/responses" => (Route::Responses, POST, Normal),
        "/v1/messages" => (Route::Messages, POST, Normal),
        "/v1/messages/count_tokens" => (Route::CountTokens, POST, Normal),
        "/v1/embeddings" | "/v1/rerank" | "/v1/classify" | "/encode" | "/classify" => (Route::Embedding, POST, Normal),
        "/v1/score" => (Route::Score, POST, Normal),
        "/v1/models" => (Route::Models, GET, Normal),
        "/tokenize" | "/v1/tokenize" => (Route::Tokenize, POST, Normal),
        "/detokenize" | "/v1/detokenize" => (Route::Detokenize, POST, Normal),
        "/health" | "/health_generate" => (Route::Health, GET, Open),
        "/ready" => (Route::Ready, GET, Open),
        "/ping" => (Route::Ping, GET, Normal),
        "/model_info" | "/get_model_info" => (Route::ModelInfo, GET, Normal),
        "/server_info" | "/get_server_info" => (Route::ServerInfo, GET, Normal),
        "/v1/loads" => (Route::Loads, GET, Normal),
        "/open_session" => (Route::OpenSession, GET_POST, Normal),
        "/close_session" => (Route::CloseSession, GET_POST, Normal),
        "/abort_request" => (Route::Abort, POST, Admin),
        "/flush_cache" => (Route::Flush, GET_POST, Admin),
        "/pause_generation" => (Route::Pause, POST, Admin),
        "/continue_generation" => (Route::Continue, POST, Admin),
        "/" => (Route::Root, &[Method::GET, Method::HEAD], Normal),
        other if other.starts_with("/v1/models/") => (Route::ModelById, GET, Normal),
        other if other.starts_with("/v1/responses/") => (Route::ResponseById, GET_POST, Normal),
        _ => return None,
    })
}

fn is_inference(route: Option<Route>) -> bool {
    matches!(route, Some(Route::Chat | Route::Completions | Route::Generate | Route::Responses | Route::Messages))
}

/// Whether the request may pass, by `utils/auth` of the real server: which key opens a route depends on which are set.
fn allowed(shared: &Shared, parts: &Parts, level: Level) -> bool {
    let path = parts.uri.path();
    let open_path = ["/health", "/ready", "/metrics"].iter().any(|open| path.starts_with(open));
    if parts.method == Method::OPTIONS || open_path || level == Level::Open {
        return true;
    }
    let (api, admin) = (shared.config.api_key.as_deref(), shared.config.admin_api_key.as_deref());
    let wanted = match level {
        Level::Admin => admin.or(api),
        _ => api,
    };
    let given = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    wanted.is_none_or(|key| given.and_then(|value| value.strip_prefix("Bearer ")) == Some(key))
}

/// Answers one request. An error cuts the connection.
pub(crate) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: Bytes) -> io::Result<Response<Body>> {
    let path = parts.uri.path();
    if let Some(name) = path.strip_prefix("/_sim/") {
        return Ok(control::respond(shared, name, &parts.method, &body));
    }
    let mut response = match before(shared, parts).await? {
        Before::Answer(response) => response,
        Before::Work(cut) => {
            let response = dispatch(shared, parts, body).await;
            match cut {
                Some(after) => reply::cut_after(response, after),
                None => response,
            }
        }
    };
    reply::stamp(&mut response, parts.headers.get(header::ORIGIN));
    Ok(response)
}

enum Before {
    Answer(Response<Body>),
    /// Go on; cut the answer after so many bytes.
    Work(Option<usize>),
}

async fn before(shared: &Arc<Shared>, parts: &Parts) -> io::Result<Before> {
    let path = parts.uri.path();
    let fault = shared.faults.take(path, is_inference(route(path).map(|(route, ..)| route)));
    match fault {
        Some(FaultKind::Status(status, body)) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return Ok(Before::Answer(match body {
                Some(body) => reply::raw_json(status, body),
                None => reply::flat_error(status, "Injected fault.", &status.as_u16().to_string()),
            }));
        }
        Some(FaultKind::ErrorEvent(code, message)) => {
            let frames = [reply::error_event(code, &message), reply::done()].concat();
            return Ok(Before::Answer(reply::events(Bytes::from(frames))));
        }
        Some(FaultKind::Hang) => std::future::pending::<()>().await,
        Some(FaultKind::CutAfterBytes(0)) => return Err(io::Error::other("cut by a fault")),
        Some(FaultKind::CutAfterBytes(after)) => return Ok(Before::Work(Some(after))),
        Some(FaultKind::Delay(time)) => tokio::time::sleep(time).await,
        Some(FaultKind::Crash) => {
            shared.kill();
            return Err(io::Error::other("crashed by a fault"));
        }
        Some(FaultKind::Wedge) => {
            shared.driver.each(|now_us, engine| engine.set_paused(now_us, true));
        }
        Some(FaultKind::Unwedge) => {
            shared.driver.each(|now_us, engine| engine.set_paused(now_us, false));
        }
        None => {}
    }
    Ok(Before::Work(None))
}

async fn dispatch(shared: &Arc<Shared>, parts: &Parts, body: Bytes) -> Response<Body> {
    let path = parts.uri.path();
    let found = route(path);
    if !allowed(shared, parts, found.map_or(Level::Normal, |(.., level)| level)) {
        return reply::raw_json(StatusCode::UNAUTHORIZED, "{\"error\":\"Unauthorized\"}");
    }
    let Some((route, methods, _)) = found else {
        return reply::raw_json(StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}");
    };
    if parts.method == Method::OPTIONS {
        return reply::preflight();
    }
    if !methods.contains(&parts.method) {
        return reply::wrong_method(methods);
    }
    match route {
        Route::Chat => chat::respond(shared, parts, &body).await,
        Route::Completions => completions::respond(shared, parts, &body).await,
        Route::Generate => generate::respond(shared, parts, &body).await,
        Route::Responses => responses::respond(shared, parts, &body).await,
        Route::ResponseById => responses::by_id(),
        Route::Messages => messages::respond(shared, parts, &body).await,
        Route::CountTokens => messages::count(shared, &body),
        Route::Embedding => info::no_embedding(),
        Route::Score => info::score(parts, &body),
        Route::Models => info::models(shared),
        Route::ModelById => info::model(shared, path.strip_prefix("/v1/models/").unwrap_or_default()),
        Route::Tokenize => info::tokenize(shared, parts, &body),
        Route::Detokenize => info::detokenize(parts, &body),
        Route::Health => info::health(shared).await,
        Route::Ready => info::ready(shared),
        Route::Ping => reply::empty(StatusCode::OK),
        Route::ModelInfo => info::model_info(shared),
        Route::ServerInfo => info::server_info(shared),
        Route::Loads => info::loads(shared, parts.uri.query().unwrap_or_default()),
        Route::OpenSession => sessions::open(shared, &body),
        Route::CloseSession => sessions::close(shared, &body),
        Route::Abort => sessions::abort(shared, &body),
        Route::Flush => sessions::flush(shared),
        Route::Pause => sessions::pause(shared, true),
        Route::Continue => sessions::pause(shared, false),
        Route::Root => reply::raw_json(StatusCode::OK, "\"SGLang is running\""),
    }
}
