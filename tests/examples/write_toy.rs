//! Writes the toys that stand for real models as GGUF files: `write_toy FOLDER`.

use std::path::PathBuf;

use neuropil_tests::toy::named;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("give a folder")?);
    for (name, toy) in named() {
        toy.write(&folder.join(format!("{name}.gguf")))?;
    }
    Ok(())
}
