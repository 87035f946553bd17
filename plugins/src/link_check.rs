//! Does this host have what a module imports?

use wasmtime::{AsContextMut, ExternType, FuncType, ImportType, InstancePre, Linker, Module, Store, Val};

use crate::abi::Status;
use crate::callback::describe;
use crate::guest_memory::Call;
use crate::host::{Host, Once};
use crate::spec::PluginSpec;

/// Links a module against this host's imports.
///
/// # Errors
/// Text naming every import that is missing or of another type.
pub(crate) fn link(
    linker: &Linker<Host>,
    module: &Module,
    store: &mut Store<Host>,
    spec: &PluginSpec,
) -> Result<InstancePre<Host>, String> {
    let problems = problems(linker, module, store);
    let instantiate = |linker: &Linker<Host>| linker.instantiate_pre(module).map_err(|error| format!("{error:#}"));
    for name in spec.allowed_imports.iter().flatten() {
        let known = ["env", "wasi_snapshot_preview1"].iter().any(|from| linker.get(&mut *store, from, name).is_ok());
        if !known {
            return Err(format!("{name} is allowed to the plugin, and no function of this host has that name"));
        }
    }
    let disallowed = disallowed(module, spec);
    if problems.is_empty() && disallowed.is_empty() {
        return instantiate(linker);
    }
    let can_stub = problems.iter().all(|problem| problem.stub.is_some());
    let stubbed = can_stub && spec.stub_unknown_imports;
    if !stubbed && !problems.is_empty() {
        let hint = if can_stub { "; with stub_unknown_imports the module starts without them" } else { "" };
        let texts = problems.into_iter().map(|problem| problem.text).collect::<Vec<_>>().join("; ");
        return Err(format!("{texts}{hint}"));
    }
    let mut linker = linker.clone();
    linker.allow_shadowing(true);
    for problem in problems {
        if let Some(ty) = problem.stub {
            stub(&mut linker, &problem.name, ty).map_err(|error| format!("{error:#}"))?;
        }
    }
    for import in disallowed {
        refuse(&mut linker, import).map_err(|error| format!("{error:#}"))?;
    }
    instantiate(&linker)
}

/// A function that a plugin imports and may not use.
struct Disallowed {
    module: String,
    name: String,
    ty: FuncType,
}

/// What the module imports and its plugin was not allowed. Stopping itself is allowed to every guest, and what only its
/// toolchain needs.
fn disallowed(module: &Module, spec: &PluginSpec) -> Vec<Disallowed> {
    let Some(allowed) = &spec.allowed_imports else { return Vec::new() };
    let mut all = Vec::new();
    for import in module.imports() {
        let (from, name) = (import.module(), import.name());
        let restricted =
            (from == "env" && name.starts_with("proxy_")) || (from.starts_with("wasi_") && name != "proc_exit");
        let ExternType::Func(ty) = import.ty() else { continue };
        if restricted && !allowed.iter().any(|allowed| allowed == name) {
            all.push(Disallowed { module: from.to_owned(), name: name.to_owned(), ty });
        }
    }
    all
}

/// WASI's errno for something that was not allowed.
const NOT_CAPABLE: i32 = 76;

fn refuse(linker: &mut Linker<Host>, import: Disallowed) -> wasmtime::Result<()> {
    let Disallowed { module, name, ty } = import;
    let answer = if module == "env" { Status::InternalFailure as i32 } else { NOT_CAPABLE };
    let import = name.clone();
    linker.func_new(&module, &name, ty, move |call: Call<'_>, _: &[Val], results: &mut [Val]| {
        let plugin = &call.data().plugin;
        plugin.say_once(Once::DisallowedImport, format_args!("import {import} is not allowed to this plugin"));
        if let Some(result) = results.first_mut() {
            *result = Val::I32(answer);
        }
        Ok(())
    })?;
    Ok(())
}

/// Why an import cannot be linked.
pub(crate) struct Problem {
    name: String,
    /// For the operator, with the import's name and type.
    pub(crate) text: String,
    /// The type of a function that can be bound in place of the missing one.
    pub(crate) stub: Option<FuncType>,
}

fn problems(linker: &Linker<Host>, module: &Module, store: &mut Store<Host>) -> Vec<Problem> {
    module.imports().filter_map(|import| problem(linker, &import, store)).collect()
}

/// What keeps an import from being linked, if anything does.
pub(crate) fn problem(linker: &Linker<Host>, import: &ImportType<'_>, store: &mut Store<Host>) -> Option<Problem> {
    let wanted = import.ty();
    let name = format!("{}.{}", import.module(), import.name());
    let text = match linker.get_by_import(store.as_context_mut(), import) {
        Some(present) => {
            let present = present.ty(&store);
            if same(&wanted, &present) {
                return None;
            }
            format!("import {name} has type {}, this host has {}", describe(&wanted), describe(&present))
        }
        None => format!("unknown import {name}: {}", describe(&wanted)),
    };
    let stub = match wanted {
        ExternType::Func(ty) if import.module() == "env" && returns_status(&ty) => Some(ty),
        _ => None,
    };
    Some(Problem { name: import.name().to_owned(), text, stub })
}

fn same(wanted: &ExternType, present: &ExternType) -> bool {
    match (wanted, present) {
        (ExternType::Func(wanted), ExternType::Func(present)) => FuncType::eq(wanted, present),
        _ => false,
    }
}

fn returns_status(ty: &FuncType) -> bool {
    ty.results().len() == 1 && ty.results().all(|ty| ty.is_i32())
}

fn stub(linker: &mut Linker<Host>, name: &str, ty: FuncType) -> wasmtime::Result<()> {
    let import = name.to_owned();
    linker.func_new("env", name, ty, move |call: Call<'_>, _: &[Val], results: &mut [Val]| {
        let plugin = &call.data().plugin;
        plugin.say_once(Once::UnknownImport, format_args!("import {import} is unknown here; it answers UNIMPLEMENTED"));
        if let Some(result) = results.first_mut() {
            *result = Val::I32(Status::Unimplemented as i32);
        }
        Ok(())
    })?;
    Ok(())
}
