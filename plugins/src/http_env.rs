//! Ready-made pieces of a stream environment over the `http` crate's types.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use crate::abi::{BufferType, MapType, Status};
use crate::env::{HeaderPairs, StreamEnv};
use crate::pairs;

/// Headers without pseudo-headers: trailers, or the common part of the maps below.
#[derive(Clone, Debug, Default)]
pub struct FieldMap {
    /// The fields. Whoever writes gets a copy of their own, unless nobody else has them.
    pub fields: Arc<HeaderMap>,
}

/// A request's headers with its pseudo-headers. `host` and `:authority` are the same thing here, shown as `:authority`.
#[derive(Clone, Debug)]
pub struct RequestMap {
    /// `:method`
    pub method: Method,
    /// `:path`, with the query.
    pub path: Bytes,
    /// `:authority`
    pub authority: Bytes,
    /// `:scheme`; guests cannot change it.
    pub scheme: &'static str,
    /// Everything else. A `host` in it is not shown: it is [`RequestMap::authority`].
    pub fields: FieldMap,
    sealed: bool,
}

/// A response's headers with `:status`.
#[derive(Clone, Debug)]
pub struct ResponseMap {
    /// `:status`
    pub status: StatusCode,
    /// Everything else.
    pub fields: FieldMap,
    sealed: bool,
}

/// A held body that guests may edit.
#[derive(Clone, Debug, Default)]
pub struct Body {
    /// The bytes held now.
    pub bytes: Bytes,
}

/// A whole exchange in memory: enough to run plugins in tests, tools and benchmarks.
#[derive(Debug, Default)]
pub struct HttpEnv {
    /// Headers of the request.
    pub request: Option<RequestMap>,
    /// Body of the request.
    pub request_body: Option<Body>,
    /// Trailers of the request.
    pub request_trailers: Option<FieldMap>,
    /// Headers of the response.
    pub response: Option<ResponseMap>,
    /// Body of the response.
    pub response_body: Option<Body>,
    /// Trailers of the response.
    pub response_trailers: Option<FieldMap>,
    /// The hosts that the request can go to, for guests of Higress' dialect; nothing: there is nothing to route.
    pub hosts: Option<Vec<(String, String)>>,
    /// The host that a guest wants the request to go to.
    pub override_host: Option<Vec<u8>>,
    /// Properties by the path the guest gives.
    pub properties: HashMap<Vec<u8>, Vec<u8>>,
}

// === impl FieldMap ===

impl FieldMap {
    /// Wraps a header map.
    pub fn new(fields: impl Into<Arc<HeaderMap>>) -> Self {
        Self { fields: fields.into() }
    }

    /// The fields, to be changed.
    pub fn fields_mut(&mut self) -> &mut HeaderMap {
        Arc::make_mut(&mut self.fields)
    }

    fn parse(name: &[u8], value: &[u8]) -> Result<(HeaderName, HeaderValue), Status> {
        let name = HeaderName::from_bytes(name).map_err(|_| Status::BadArgument)?;
        let value = HeaderValue::from_bytes(value).map_err(|_| Status::BadArgument)?;
        let is_number = || !value.is_empty() && value.as_bytes().iter().all(u8::is_ascii_digit);
        if name == CONTENT_LENGTH && !is_number() {
            return Err(Status::BadArgument);
        }
        Ok((name, value))
    }

    /// Refuses what would make the map larger than one that a guest may hand over at once: header by header it could
    /// otherwise grow beyond all bounds, those of the map's own type included.
    fn has_room(&self, name: &HeaderName, value: &HeaderValue, replaces: bool) -> Result<(), Status> {
        let size = |name: &HeaderName, value: &HeaderValue| name.as_str().len() + value.len();
        let stays = self.fields.iter().filter(|(other, _)| !(replaces && *other == name));
        let (count, bytes) = stays.fold((0, 0), |(count, bytes), (name, value)| (count + 1, bytes + size(name, value)));
        if count >= pairs::MAX_PAIRS || bytes + size(name, value) > pairs::MAX_BYTES {
            return Err(Status::BadArgument);
        }
        Ok(())
    }
}

impl HeaderPairs for FieldMap {
    fn len(&self) -> usize {
        self.fields.len()
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        for (name, value) in &*self.fields {
            each(name.as_str().as_bytes(), value.as_bytes());
        }
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        let name = HeaderName::from_bytes(name).ok()?;
        self.fields.get(name).map(|value| Cow::Borrowed(value.as_bytes()))
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        let (name, value) = Self::parse(name, value)?;
        self.has_room(&name, &value, name == CONTENT_LENGTH)?;
        // A second content-length would make the message ambiguous.
        let fields = self.fields_mut();
        if name == CONTENT_LENGTH {
            fields.insert(name, value);
        } else {
            fields.try_append(name, value).map_err(|_| Status::BadArgument)?;
        }
        Ok(())
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        let (name, value) = Self::parse(name, value)?;
        self.has_room(&name, &value, true)?;
        self.fields_mut().try_insert(name, value).map_err(|_| Status::BadArgument)?;
        Ok(())
    }

    fn remove(&mut self, name: &[u8]) -> Result<(), Status> {
        if let Ok(name) = HeaderName::from_bytes(name)
            && self.fields.contains_key(&name)
        {
            self.fields_mut().remove(name);
        }
        Ok(())
    }

    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status> {
        let mut map = FieldMap::default();
        for (name, value) in pairs {
            map.add(name, value)?;
        }
        *self = map;
        Ok(())
    }
}

// === impl RequestMap ===

/// What a name of a request map stands for.
enum RequestName {
    Method,
    Path,
    Authority,
    Scheme,
    UnknownPseudo,
    Field,
}

impl RequestMap {
    /// A request for `path` (with query) at `authority`, or else at the `host` among `fields`.
    pub fn new(
        method: Method,
        path: impl Into<Bytes>,
        authority: impl Into<Bytes>,
        fields: impl Into<Arc<HeaderMap>>,
    ) -> Self {
        let (mut authority, fields) = (authority.into(), fields.into());
        if let Some(host) = fields.get(HOST)
            && authority.is_empty()
        {
            authority = Bytes::copy_from_slice(host.as_bytes());
        }
        Self { method, path: path.into(), authority, scheme: "http", fields: FieldMap::new(fields), sealed: false }
    }

    /// The head has gone on: from now on it can be read only.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    fn name(name: &[u8]) -> RequestName {
        let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
        match name.first() {
            Some(b':') if is(":method") => RequestName::Method,
            Some(b':') if is(":path") => RequestName::Path,
            Some(b':') if is(":authority") => RequestName::Authority,
            Some(b':') if is(":scheme") => RequestName::Scheme,
            Some(b':') => RequestName::UnknownPseudo,
            Some(b'h' | b'H') if is("host") => RequestName::Authority,
            _ => RequestName::Field,
        }
    }

    fn set_pseudo(&mut self, which: &RequestName, value: &[u8]) -> Result<(), Status> {
        match which {
            RequestName::Method => self.method = Method::from_bytes(value).map_err(|_| Status::BadArgument)?,
            RequestName::Path if value.first() == Some(&b'/') && value.iter().all(u8::is_ascii_graphic) => {
                self.path = Bytes::copy_from_slice(value);
            }
            RequestName::Authority if !value.is_empty() && value.iter().all(u8::is_ascii_graphic) => {
                self.authority = Bytes::copy_from_slice(value);
            }
            _ => return Err(Status::BadArgument),
        }
        Ok(())
    }
}

impl HeaderPairs for RequestMap {
    fn len(&self) -> usize {
        4 + self.fields.len() - self.fields.fields.get_all(HOST).iter().count()
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        // Envoy's order.
        each(b":authority", &self.authority);
        each(b":path", &self.path);
        each(b":method", self.method.as_str().as_bytes());
        each(b":scheme", self.scheme.as_bytes());
        for (name, value) in self.fields.fields.iter().filter(|(name, _)| *name != HOST) {
            each(name.as_str().as_bytes(), value.as_bytes());
        }
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        match Self::name(name) {
            RequestName::Method => Some(Cow::Borrowed(self.method.as_str().as_bytes())),
            RequestName::Path => Some(Cow::Borrowed(&self.path)),
            RequestName::Authority => Some(Cow::Borrowed(&self.authority)),
            RequestName::Scheme => Some(Cow::Borrowed(self.scheme.as_bytes())),
            RequestName::UnknownPseudo => None,
            RequestName::Field => self.fields.get(name),
        }
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        match Self::name(name) {
            RequestName::Field => self.fields.add(name, value),
            pseudo => self.set_pseudo(&pseudo, value),
        }
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        match Self::name(name) {
            RequestName::Field => self.fields.replace(name, value),
            pseudo => self.set_pseudo(&pseudo, value),
        }
    }

    fn remove(&mut self, name: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        match Self::name(name) {
            RequestName::Field => self.fields.remove(name),
            _ => Err(Status::BadArgument),
        }
    }

    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status> {
        open(self.sealed)?;
        let mut next = Self { fields: FieldMap::default(), ..self.clone() };
        for (name, value) in pairs {
            match Self::name(name) {
                // Guests hand back what they read, the scheme included.
                RequestName::Scheme => {}
                _ => next.add(name, value)?,
            }
        }
        *self = next;
        Ok(())
    }
}

// === impl ResponseMap ===

impl ResponseMap {
    /// A response.
    pub fn new(status: StatusCode, fields: impl Into<Arc<HeaderMap>>) -> Self {
        Self { status, fields: FieldMap::new(fields), sealed: false }
    }

    /// The head has gone on: from now on it can be read only.
    pub fn seal(&mut self) {
        self.sealed = true;
    }

    fn set_status(&mut self, value: &[u8]) -> Result<(), Status> {
        let status = StatusCode::from_bytes(value).map_err(|_| Status::BadArgument)?;
        if !(200..600).contains(&status.as_u16()) {
            return Err(Status::BadArgument);
        }
        self.status = status;
        Ok(())
    }
}

fn is_status(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b":status")
}

impl HeaderPairs for ResponseMap {
    fn len(&self) -> usize {
        1 + self.fields.len()
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        each(b":status", self.status.as_str().as_bytes());
        self.fields.for_each(each);
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        if is_status(name) {
            return Some(Cow::Borrowed(self.status.as_str().as_bytes()));
        }
        self.fields.get(name)
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        if is_status(name) { self.set_status(value) } else { self.fields.add(name, value) }
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        if is_status(name) { self.set_status(value) } else { self.fields.replace(name, value) }
    }

    fn remove(&mut self, name: &[u8]) -> Result<(), Status> {
        open(self.sealed)?;
        if is_status(name) { Err(Status::BadArgument) } else { self.fields.remove(name) }
    }

    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status> {
        open(self.sealed)?;
        let mut next = Self { status: self.status, fields: FieldMap::default(), sealed: false };
        for (name, value) in pairs {
            next.add(name, value)?;
        }
        *self = next;
        Ok(())
    }
}

/// Refuses to write where nothing can be changed any more.
fn open(sealed: bool) -> Result<(), Status> {
    if sealed { Err(Status::BadArgument) } else { Ok(()) }
}

// === impl Body ===

impl Body {
    /// A body that holds these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self { bytes: bytes.into() }
    }

    /// Replaces a range; what lies beyond the end counts as the end. Bytes that nobody else holds are edited in place.
    pub fn replace(&mut self, range: Range<usize>, data: &[u8]) {
        let len = self.bytes.len();
        let end = range.end.min(len);
        let start = range.start.min(end);
        if start == 0 && end == len {
            self.bytes = Bytes::copy_from_slice(data);
            return;
        }
        let mut bytes = Vec::from(std::mem::take(&mut self.bytes));
        if start == len {
            bytes.extend_from_slice(data);
        } else {
            bytes.splice(start..end, data.iter().copied());
        }
        self.bytes = Bytes::from(bytes);
    }
}

// === impl HttpEnv ===

impl HttpEnv {
    /// An exchange whose request has these headers and no body.
    pub fn request(request: RequestMap) -> Self {
        Self { request: Some(request), ..Self::default() }
    }
}

impl StreamEnv for HttpEnv {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        self.properties.get(path).map(|value| Cow::Borrowed(value.as_slice()))
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        self.properties.insert(path.to_vec(), value.to_vec());
        Ok(())
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        match map {
            MapType::RequestHeaders => self.request.as_mut().map(|map| map as &mut dyn HeaderPairs),
            MapType::RequestTrailers => self.request_trailers.as_mut().map(|map| map as &mut dyn HeaderPairs),
            MapType::ResponseHeaders => self.response.as_mut().map(|map| map as &mut dyn HeaderPairs),
            MapType::ResponseTrailers => self.response_trailers.as_mut().map(|map| map as &mut dyn HeaderPairs),
            _ => None,
        }
    }

    fn buffer(&mut self, buffer: BufferType) -> Option<&[u8]> {
        match buffer {
            BufferType::RequestBody => self.request_body.as_ref().map(|body| &body.bytes[..]),
            BufferType::ResponseBody => self.response_body.as_ref().map(|body| &body.bytes[..]),
            _ => None,
        }
    }

    fn replace_buffer(&mut self, buffer: BufferType, range: Range<usize>, data: &[u8]) -> Result<(), Status> {
        let body = match buffer {
            BufferType::RequestBody => self.request_body.as_mut(),
            BufferType::ResponseBody => self.response_body.as_mut(),
            _ => None,
        };
        body.ok_or(Status::NotFound)?.replace(range, data);
        Ok(())
    }

    fn upstream_hosts(&mut self) -> Option<Vec<(String, String)>> {
        self.hosts.clone()
    }

    fn override_host(&mut self, address: &[u8]) -> Result<(), Status> {
        if self.hosts.is_none() {
            return Err(Status::NotFound);
        }
        if address.is_empty() || !address.iter().all(u8::is_ascii_graphic) {
            return Err(Status::BadArgument);
        }
        self.override_host = Some(address.to_vec());
        Ok(())
    }
}

#[cfg(test)]
#[path = "http_env_tests.rs"]
mod tests;
