//! Does this host have what a module imports?

use wasmtime::{AsContextMut, ExternType, FuncType, InstancePre, Linker, Module, Store, Val};

use crate::abi::Status;
use crate::callback::describe;
use crate::guest_memory::Call;
use crate::host::{Host, Once};

/// Links a module against this host's imports.
///
/// # Errors
/// Text naming every import that is missing or of another type.
pub(crate) fn link(
    linker: &Linker<Host>,
    module: &Module,
    store: &mut Store<Host>,
    stub_unknown: bool,
) -> Result<InstancePre<Host>, String> {
    let problems = problems(linker, module, store);
    let instantiate = |linker: &Linker<Host>| linker.instantiate_pre(module).map_err(|error| format!("{error:#}"));
    if problems.is_empty() {
        return instantiate(linker);
    }
    let can_stub = stub_unknown && problems.iter().all(|problem| problem.stub.is_some());
    if !can_stub {
        return Err(problems.into_iter().map(|problem| problem.text).collect::<Vec<_>>().join("; "));
    }
    let mut linker = linker.clone();
    linker.allow_shadowing(true);
    for problem in problems {
        if let Some(ty) = problem.stub {
            stub(&mut linker, &problem.name, ty).map_err(|error| format!("{error:#}"))?;
        }
    }
    instantiate(&linker)
}

struct Problem {
    name: String,
    text: String,
    /// The type of a function that can be bound in place of the missing one.
    stub: Option<FuncType>,
}

fn problems(linker: &Linker<Host>, module: &Module, store: &mut Store<Host>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for import in module.imports() {
        let wanted = import.ty();
        let name = format!("{}.{}", import.module(), import.name());
        let text = match linker.get_by_import(store.as_context_mut(), &import) {
            Some(present) => {
                let present = present.ty(&store);
                if same(&wanted, &present) {
                    continue;
                }
                format!("import {name} has type {}, this host has {}", describe(&wanted), describe(&present))
            }
            None => format!("unknown import {name}: {}", describe(&wanted)),
        };
        let stub = match wanted {
            ExternType::Func(ty) if import.module() == "env" && returns_status(&ty) => Some(ty),
            _ => None,
        };
        problems.push(Problem { name: import.name().to_owned(), text, stub });
    }
    problems
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
