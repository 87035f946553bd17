//! The HTTP face: routes, keys, faults, and one module for each family of endpoints.

mod chat;
mod completions;
mod control;
mod fields;
mod frontend;
mod generate;
mod info;
mod messages;
mod metrics;
mod pieces;
mod reply;
mod responses;
mod sessions;
mod trouble;
mod validate;

pub(crate) use reply::{Body, holding};
use trouble::Change;
pub(crate) use trouble::{Trouble, request_id, trouble};

use crate::{driver::REJECTION, fault::Moment, server::Shared, wire::Wire};
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
    GetLoad,
    Metrics,
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
        "/get_load" => (Route::GetLoad, GET, Normal),
        "/metrics" | "/metrics/" => (Route::Metrics, GET, Open),
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

/// Answers one request. An error closes the connection.
pub(crate) async fn respond(
    shared: &Arc<Shared>,
    parts: &Parts,
    body: Bytes,
    wire: &Wire,
) -> io::Result<Response<Body>> {
    if let Some(name) = parts.uri.path().strip_prefix("/_sim/") {
        return Ok(control::respond(shared, name, parts, &body));
    }
    let change = match trouble(shared, parts, wire, Moment::Whole).await? {
        Trouble::Answer(response) => return Ok(response),
        Trouble::Work(change) => change,
    };
    let mut response = match &change {
        Some(Change::Reject(code, message)) => {
            REJECTION.scope((*code, message.clone()), dispatch(shared, parts, body)).await
        }
        _ => dispatch(shared, parts, body).await,
    };
    frontend::stamp(&shared.config, &mut response, parts.headers.get(header::ORIGIN));
    match change {
        Some(change) => trouble::change(response, change, wire).await,
        None => Ok(response),
    }
}

async fn dispatch(shared: &Arc<Shared>, parts: &Parts, body: Bytes) -> Response<Body> {
    let path = parts.uri.path();
    let found = route(path).filter(|(route, ..)| frontend::has(&shared.config, *route));
    if !allowed(shared, parts, found.map_or(Level::Normal, |(.., level)| level)) {
        return reply::raw_json(StatusCode::UNAUTHORIZED, "{\"error\":\"Unauthorized\"}");
    }
    let Some((route, methods, _)) = found else {
        return frontend::not_found(&shared.config);
    };
    if parts.method == Method::OPTIONS {
        return reply::preflight();
    }
    if !methods.contains(&parts.method) {
        return frontend::wrong_method(&shared.config, methods);
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
        Route::GetLoad => info::get_load(shared),
        Route::Metrics => metrics::respond(shared),
        Route::OpenSession => sessions::open(shared, &body),
        Route::CloseSession => sessions::close(shared, &body),
        Route::Abort => sessions::abort(shared, &body),
        Route::Flush => sessions::flush(shared),
        Route::Pause => sessions::pause(shared, true),
        Route::Continue => sessions::pause(shared, false),
        Route::Root => reply::raw_json(StatusCode::OK, "\"SGLang is running\""),
    }
}
