//! Turnstile.
