//! The I/O engines: the same bytes from each, whatever storage does on the way.

mod faults;
mod fixture;
mod life;
mod same;
mod throttle;
