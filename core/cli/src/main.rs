//! Program.
fn main(){}
