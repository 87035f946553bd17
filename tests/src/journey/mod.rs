//! A policy from an empty folder to production and back, in every language, while agents stream: what docs/writing-policies.md
//! tells its reader to do, done with the same commands and the same configuration.
//!
//! [`project`] makes, builds and tries the policy with the command line; [`stage`] is the gateway and its workers, [`agents`] the
//! conversations that go on meanwhile, each answer compared with what a worker says directly; [`steps`] is the way itself.

mod account;
mod agents;
mod configuration;
mod language;
mod project;
mod stage;
mod steps;

pub use language::Language;

use account::Account;
use project::Project;
use stage::Stage;

/// Takes every language along the way and prints a line for each step. Returns what failed.
///
/// # Errors
/// The gateway's binary is missing, or there is no folder to work in.
pub async fn run(languages: &[Language]) -> Result<Vec<String>, String> {
    let dir = tempfile::Builder::new().prefix("turnstile-journey-").tempdir().map_err(|e| e.to_string())?;
    let mut account = Account::default();
    for language in languages {
        let folder = dir.path().join(language.name());
        std::fs::create_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let project = Project::new(*language, &folder)?;
        account.language(language.name());
        if steps::write(&project, &mut account).await.is_none() {
            continue;
        }
        let staged = Stage::set(&folder.join("gateway")).await;
        let Some(mut stage) = account.step("gateway", staged.map(|stage| (stage.described(), stage))) else { continue };
        let travelled = steps::to_production_and_back(&project, &mut stage, &mut account).await;
        // Also after a step that failed: what the agents saw belongs to the account.
        let ended = stage.strike().await;
        if let (Some(()), Some(traffic)) = (travelled, account.step("agents", ended)) {
            account.travelled(traffic);
        }
    }
    Ok(account.close())
}

#[cfg(test)]
mod tests;
