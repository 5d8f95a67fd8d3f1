//! Saved plans: a weight comes back as it was, and damage is found. And how long the bytes of a source must live.

use neuropil_plugin_abi::{self as abi, AbiStruct, NpPlan, NpPrepared};

use super::{Values, ask_matmul, check_product, least, multiply, plain, prepared};
use crate::border::Border;
use crate::case::{Cases, Ended, Found, Stop, ensure};
use crate::raw::{Padded, Weight};
use crate::sample::{Fill, Kind, Sample};
use crate::subject::Subject;

/// Places in a plan, in parts of 16, where bytes are cut off or changed.
const PLACES: [usize; 7] = [0, 1, 3, 5, 8, 11, 15];

pub fn cases<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    for kind in border.kinds() {
        let scheme = kind.name();
        cases.add(format!("weight/in-place/{scheme}"), move || in_place(border, kind));
        cases.add(format!("weight/plan/{scheme}/round-trip"), move || round_trip(border, kind));
        cases.add(format!("weight/plan/{scheme}/saved-twice"), move || saved_twice(border, kind));
        cases.add(format!("weight/plan/{scheme}/writing-stops"), move || writing_stops(border, kind));
        cases.add(format!("weight/plan/{scheme}/empty"), move || damaged(border, kind, |_| Vec::new()));
        cases.add(format!("weight/plan/{scheme}/longer"), move || {
            damaged(border, kind, |plan| [plan, &[0; 64]].concat())
        });
        cases.add(format!("weight/plan/{scheme}/of-something-else"), move || {
            damaged(border, kind, |plan| (0..plan.len()).map(|index| (index * 7) as u8).collect())
        });
        cases.add(format!("weight/plan/{scheme}/zeros"), move || {
            damaged(border, kind, |plan| vec![0; plan.len()])
        });
        for place in PLACES {
            cases.add(format!("weight/plan/{scheme}/cut-at-{place}-of-16"), move || {
                damaged(border, kind, |plan| plan[..plan.len() * place / 16].to_vec())
            });
            cases.add(format!("weight/plan/{scheme}/changed-at-{place}-of-16"), move || {
                damaged(border, kind, |plan| {
                    let mut plan = plan.to_vec();
                    let at = plan.len() * place / 16;
                    plan.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 0x10);
                    plan
                })
            });
        }
    }
    for name in ["no-plan", "no-place", "newer-plan"] {
        cases.add(format!("weight/plan-struct/{name}"), move || plan_struct(border, name));
    }
}

/// Bytes that live as long as the weight may be used in place.
fn in_place(border: &Border, kind: Kind) -> Ended {
    let shape = plain(kind);
    ask_matmul(border, kind, shape, least(border))?;
    let sample = border.sample(kind, shape, Fill::Random, 40);
    let weight = border.device.prepare_for(abi::NP_LIFETIME_WEIGHT, &[&sample]);
    let weight = weight.map_err(|failure| Stop::failed("prepare", &failure))?;
    check_product(border, kind, (&weight, &sample), least(border), 6)
}

/// A weight and its plan.
fn saved<'a>(border: &'a Border, kind: Kind) -> Result<(Weight<'a>, Sample, Vec<u8>), Stop> {
    offers_plans(border)?;
    let (weight, sample) = prepared(border, kind, plain(kind), (Fill::Random, 1))?;
    let plan = match border.device.save_plan(&weight) {
        None => return Err(Stop::Unsupported("the plugin does not offer saved plans".into())),
        Some(Err(failure)) if failure.code == abi::NP_UNSUPPORTED => {
            return Err(Stop::Unsupported(failure.text));
        }
        Some(plan) => plan.map_err(|failure| Stop::failed("save_plan", &failure))?,
    };
    ensure(!plan.is_empty(), || "the plan is empty".into())?;
    Ok((weight, sample, plan))
}

fn offers_plans(border: &Border) -> Result<(), Stop> {
    let table = border.device.table();
    if table.save_plan.is_none() || table.load_plan.is_none() {
        return Err(Stop::Unsupported("the plugin does not offer saved plans".into()));
    }
    let info = border.device.try_info().map_err(|failure| Stop::failed("info", &failure))?;
    if info.compatibility.is_empty() {
        return Err(Stop::Unsupported(
            "the unit has no compatibility text, so plans are never given back".into(),
        ));
    }
    Ok(())
}

/// A weight that was loaded multiplies as the one that was saved.
fn round_trip(border: &Border, kind: Kind) -> Ended {
    let (weight, sample, plan) = saved(border, kind)?;
    let loaded = border.device.load_plan(&plan, sample.rows, sample.cols);
    let loaded = loaded.map_err(|failure| Stop::failed("load_plan", &failure))?;
    let found = check_product(border, kind, (&loaded, &sample), least(border), 1)?;
    same_product(border, &weight, &loaded, &sample)?;
    drop(weight);
    check_product(border, kind, (&loaded, &sample), least(border), 2)?;
    Ok(found)
}

fn same_product(border: &Border, one: &Weight<'_>, other: &Weight<'_>, sample: &Sample) -> Result<(), Stop> {
    let tokens = least(border);
    let x = Values::Random.input(tokens, sample.cols, 3);
    let (want, found) = (multiply(border, &[one], &x, tokens)?, multiply(border, &[other], &x, tokens)?);
    ensure(want == found, || {
        "a weight that was loaded multiplies otherwise than the one that was saved".into()
    })
}

fn saved_twice(border: &Border, kind: Kind) -> Ended {
    let (_, sample, plan) = saved(border, kind)?;
    let loaded = border.device.load_plan(&plan, sample.rows, sample.cols);
    let loaded = loaded.map_err(|failure| Stop::failed("load_plan", &failure))?;
    let again = border.device.save_plan(&loaded);
    let again = match again {
        Some(Ok(again)) => again,
        Some(Err(failure)) if failure.code == crate::raw::BREACH => return Err(Stop::wrong(failure.text)),
        // Vendors do not like it, and the host still has the plan.
        Some(Err(failure)) => return Err(Stop::Unsupported(failure.to_string())),
        None => return Err(Stop::wrong("save_plan is gone")),
    };
    let third = border.device.load_plan(&again, sample.rows, sample.cols);
    let third = third.map_err(|failure| Stop::failed("load_plan of that", &failure))?;
    check_product(border, kind, (&third, &sample), least(border), 1)
}

/// A host that writes no more.
fn writing_stops(border: &Border, kind: Kind) -> Ended {
    let (weight, sample, _) = saved(border, kind)?;
    match border.device.save_plan_until(&weight, 1) {
        Some(Err(failure)) if failure.code == abi::NP_CANCELLED => {}
        // The plan may have been one piece, after which there is nothing to stop.
        Some(Ok(_)) | None => {}
        Some(Err(failure)) => return Err(Stop::failed("save_plan that is stopped", &failure)),
    }
    check_product(border, kind, (&weight, &sample), least(border), 1)
}

/// A damaged plan is refused, or gives the right weight all the same.
fn damaged(border: &Border, kind: Kind, damage: impl FnOnce(&[u8]) -> Vec<u8>) -> Ended {
    let (weight, sample, plan) = saved(border, kind)?;
    match border.device.load_plan(&damage(&plan), sample.rows, sample.cols) {
        Err(failure) if failure.code == crate::raw::BREACH => return Err(Stop::wrong(failure.text)),
        Err(failure) if failure.code == abi::NP_LOST => return Err(Stop::failed("load_plan", &failure)),
        Err(_) => {}
        Ok(loaded) => same_product(border, &weight, &loaded, &sample)
            .map_err(|_| Stop::wrong("a damaged plan is taken, and gives another weight"))?,
    }
    check_product(border, kind, (&weight, &sample), least(border), 4)
}

fn plan_struct(border: &Border, name: &str) -> Ended {
    let kind = super::errors::offered(border)?;
    let (_, sample, bytes) = saved(border, kind)?;
    let plan = NpPlan { data: bytes.as_ptr().cast(), data_bytes: bytes.len() as u64, ..NpPlan::new() };
    let mut place = NpPrepared::new();
    let result = match name {
        "no-plan" => border.device.load_plan_structs(std::ptr::null(), &mut place),
        "no-place" => border.device.load_plan_structs(&plan, std::ptr::null_mut()),
        _ => {
            let longer = Padded::new(plan);
            let loaded = border.device.load_plan_structs(longer.pointer(), &mut place);
            loaded.map_err(|failure| Stop::failed("load_plan", &failure))?;
            let weight = border.device.weight(place, (sample.rows, sample.cols));
            let weight = weight.map_err(|failure| Stop::failed("load_plan", &failure))?;
            return check_product(border, kind, (&weight, &sample), least(border), 1);
        }
    };
    match result {
        Ok(()) => Err(Stop::wrong("it is not refused")),
        Err(failure) if failure.code == crate::raw::BREACH => Err(Stop::wrong(failure.text)),
        Err(_) => Ok(Found::default()),
    }
}
