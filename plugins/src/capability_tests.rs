#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;

use wasmtime::Store;

use super::*;
use crate::abi::{AbiVersion, Dialect};
use crate::callback::CallbackSet;
use crate::host::{Host, Loaded};
use crate::services::SharedState;
use crate::{PluginSpec, Runtime, RuntimeOptions};

#[test]
fn every_function_of_this_host_belongs_to_a_group() {
    let runtime = Runtime::new(RuntimeOptions::default()).unwrap();
    let spec = PluginSpec::new("none", Vec::new());
    let services = Arc::new(SharedState::default());
    let loaded = Arc::new(Loaded::new(spec, AbiVersion::V0_2_1, CallbackSet::default(), services, Arc::default()));
    let mut store = Store::new(runtime.engine(), Host::new(loaded, 0));
    let mut groups = BTreeSet::new();
    let names: Vec<_> =
        runtime.linker(Dialect::Higress).iter(&mut store).map(|(m, n, _)| (m.to_owned(), n.to_owned())).collect();
    for (module, name) in names {
        groups.insert(Capability::of(&module, &name).unwrap_or_else(|| panic!("{module}.{name} has no group")));
    }
    assert_eq!(groups.into_iter().collect::<Vec<_>>(), Capability::ALL, "a group without a function");
}

#[test]
fn names_and_words_are_unique() {
    let names: BTreeSet<_> = Capability::ALL.iter().map(|c| c.name()).collect();
    let words: BTreeSet<_> = Capability::ALL.iter().map(ToString::to_string).collect();
    assert_eq!((names.len(), words.len()), (Capability::ALL.len(), Capability::ALL.len()));
}
