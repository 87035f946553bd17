//! What the gateway lends to a guest for the time of a callback.

use std::any::Any;
use std::borrow::Cow;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::abi::{BufferType, MapType, Status};
use crate::berth::Berth;

/// One stream as its plugins see it: properties, header maps, body buffers, foreign functions.
///
/// The gateway owns the value and lends it to one callback at a time, so nothing here needs a lock. Methods run inside a
/// guest's callback: they must not block. Reads borrow from the stream; the host copies them straight into guest memory.
pub trait StreamEnv: Any + Send {
    /// The value of a property. `path` is as the guest gave it, less one trailing NUL: segments joined by NUL, or
    /// whatever string the author wrote.
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        let _ = path;
        None
    }

    /// Writes a property.
    ///
    /// # Errors
    /// Any status; a lenient plugin's guest sees OK all the same and the refusal is logged.
    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let _ = (path, value);
        Err(Status::NotFound)
    }

    /// The map, or nothing if this phase has none.
    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        let _ = map;
        None
    }

    /// The bytes of a buffer, or nothing if this phase has none. Only the two bodies, callout bodies and messages are
    /// asked for; configuration buffers are the host's.
    fn buffer(&mut self, buffer: BufferType) -> Option<&[u8]> {
        let _ = buffer;
        None
    }

    /// Replaces a range of a buffer. The range lies within the buffer's present length.
    ///
    /// # Errors
    /// [`Status::BadArgument`] if the buffer cannot be written now, [`Status::NotFound`] if there is none.
    fn replace_buffer(&mut self, buffer: BufferType, range: Range<usize>, data: &[u8]) -> Result<(), Status> {
        let _ = (buffer, range, data);
        Err(Status::NotFound)
    }

    /// The hosts that the stream's request can go to: address (`ip:port`) and a JSON object with `health_status` and, as
    /// `metrics`, a text in Prometheus' format. Nothing where there is no request to route. Higress' dialect only.
    fn upstream_hosts(&mut self) -> Option<Vec<(String, String)>> {
        None
    }

    /// Wants the request to go to the host with this address, which can be anything. Higress' dialect only.
    ///
    /// # Errors
    /// [`Status::BadArgument`] for what is no address, [`Status::NotFound`] where there is no request to route.
    fn override_host(&mut self, address: &[u8]) -> Result<(), Status> {
        let _ = address;
        Err(Status::NotFound)
    }

    /// Runs a named function of the gateway.
    ///
    /// # Errors
    /// [`Status::NotFound`] for an unknown name; [`Status::BadArgument`], [`Status::SerializationFailure`] or
    /// [`Status::InternalFailure`] from a known one. SDKs panic on others.
    fn call_foreign(&mut self, name: &str, arguments: &[u8]) -> Result<Cow<'_, [u8]>, Status> {
        let _ = (name, arguments);
        Err(Status::NotFound)
    }
}

/// A header map as a guest sees it. Names match without regard to ASCII case; values are bytes. The host has checked
/// names and values before it calls a writer: no CR, LF or NUL gets here.
pub trait HeaderPairs {
    /// Number of pairs, pseudo-headers included.
    fn len(&self) -> usize;

    /// True if there are no pairs.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `each` with every pair: pseudo-headers first, the rest in order, names in lower case. Two calls without a
    /// write between them must give the same pairs.
    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8]));

    /// The first value of a name.
    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>>;

    /// Appends a value, or sets a pseudo-header.
    ///
    /// # Errors
    /// [`Status::BadArgument`] if the map or this name cannot be written now.
    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status>;

    /// Removes all values of a name, then sets one.
    ///
    /// # Errors
    /// As [`HeaderPairs::add`].
    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status>;

    /// Removes all values of a name; absent is fine.
    ///
    /// # Errors
    /// As [`HeaderPairs::add`].
    fn remove(&mut self, name: &[u8]) -> Result<(), Status>;

    /// Replaces the whole map. Pseudo-headers that are not among the pairs keep their value.
    ///
    /// # Errors
    /// As [`HeaderPairs::add`].
    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status>;
}

/// A stream's environment in the gateway's hands, ready to be lent. Lending moves one pointer.
///
/// It reads and writes like the value itself.
#[derive(Debug)]
pub struct Lent<E> {
    // Empty only while a callback runs, and a callback borrows the whole `Lent` mutably.
    value: Option<Box<E>>,
    /// Where it lies while its owner waits.
    berth: Arc<Berth>,
}

impl<E: StreamEnv> Lent<E> {
    /// Puts the environment where callbacks can borrow it.
    pub fn new(value: E) -> Self {
        Self { value: Some(Box::new(value)), berth: Arc::default() }
    }

    /// Takes the environment back for good.
    pub fn into_inner(self) -> E {
        *self.present()
    }

    /// Lays the environment where callbacks of other contexts (replies to calls, ticks, queues) can reach it, for as long as
    /// the owner waits. See [`Stream::poll_effects`](crate::Stream::poll_effects).
    pub fn park(&mut self) -> Parked<'_, E> {
        let berth = Arc::clone(&self.berth);
        let env = self.lend();
        let holds = env.is_some();
        berth.park(env);
        Parked { lent: self, berth, holds }
    }

    #[allow(clippy::expect_used)]
    fn present(self) -> Box<E> {
        self.value.expect(HOME)
    }

    /// Where it is laid by [`Lent::park`].
    pub(crate) fn berth(&self) -> &Arc<Berth> {
        &self.berth
    }

    /// Moves the environment out for a callback; [`Lent::give_back`] must follow.
    pub(crate) fn lend(&mut self) -> Option<Box<dyn StreamEnv>> {
        self.value.take().map(|value| value as Box<dyn StreamEnv>)
    }

    /// Ends [`Lent::lend`].
    pub(crate) fn give_back(&mut self, value: Option<Box<dyn StreamEnv>>) {
        self.value = value.and_then(|value| (value as Box<dyn Any>).downcast().ok());
    }
}

const HOME: &str = "an environment is away only during a callback";

impl<E> Deref for Lent<E> {
    type Target = E;

    #[allow(clippy::expect_used)]
    fn deref(&self) -> &E {
        self.value.as_deref().expect(HOME)
    }
}

impl<E> DerefMut for Lent<E> {
    #[allow(clippy::expect_used)]
    fn deref_mut(&mut self) -> &mut E {
        self.value.as_deref_mut().expect(HOME)
    }
}

/// An environment whose owner waits. It comes home when this is dropped.
#[derive(Debug)]
pub struct Parked<'a, E: StreamEnv> {
    lent: &'a mut Lent<E>,
    berth: Arc<Berth>,
    holds: bool,
}

impl<E: StreamEnv> Parked<'_, E> {
    /// Where it lies.
    pub fn berth(&self) -> &Arc<Berth> {
        &self.berth
    }
}

impl<E: StreamEnv> Drop for Parked<'_, E> {
    fn drop(&mut self) {
        if self.holds {
            let env = self.berth.unpark();
            self.lent.give_back(env);
        }
    }
}

/// An environment that holds nothing: for streams whose owner went away.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEnv;

impl StreamEnv for NoEnv {}
