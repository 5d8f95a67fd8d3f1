//! What must not change a bit.

use neuropil::cache::{Lru, S3Fifo};
use neuropil::io::IoChoice;
use neuropil::pipeline::PipelineOptions;
use neuropil::predict::Prediction;

use super::{builder, experts, run, session, sparse, stored, tokens};

const WAYS: [Prediction; 3] = [Prediction::Off, Prediction::Model, Prediction::Gate];

#[test]
fn the_size_of_the_cache_changes_no_bit() {
    for toy in [sparse(), experts()] {
        let stored = stored(&toy);
        for prediction in WAYS {
            let want = run(&builder(&stored.store, 2, prediction).build().unwrap(), &tokens()).unwrap();
            for slots in [512, 600, 1100, 1700, 100_000] {
                let engine = builder(&stored.store, 2, prediction).neuron_slots(slots).build().unwrap();
                assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, {slots} slots");
                // Again, with what the first run left in the cache.
                assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, {slots} slots, warm");
            }
        }
    }
}

#[test]
fn neither_threads_nor_engines_nor_policies_nor_switches_change_a_bit() {
    let stored = stored(&sparse());
    let all = PipelineOptions::default();
    let switches = [
        all,
        PipelineOptions { two_phase: false, ..all },
        PipelineOptions { pipeline: false, ..all },
        PipelineOptions { bundle: false, ..all },
        PipelineOptions { cache: false, ..all },
    ];
    for prediction in WAYS {
        let make = || builder(&stored.store, 1, prediction).neuron_slots(900);
        let want = run(&builder(&stored.store, 2, prediction).build().unwrap(), &tokens()).unwrap();
        for options in switches {
            let engine = make().pipeline(options).build().unwrap();
            assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, {options:?}");
        }
        for io in ["pread", "throttle:ufs4.0", "auto"] {
            let engine = make().io(io.parse::<IoChoice>().unwrap()).build().unwrap();
            assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, {io}");
        }
        let engine =
            make().eviction(|_| Box::new(Lru::default())).hot_share(0.0).warm(false).build().unwrap();
        assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, lru");
        let engine = make().eviction(|_| Box::new(S3Fifo::default())).hot_share(0.9).build().unwrap();
        assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, s3fifo");
        let engine = builder(&stored.store, 3, prediction).neuron_slots(900).build().unwrap();
        assert_eq!(run(&engine, &tokens()).unwrap(), want, "{prediction:?}, threads");
    }
    let mapped = builder(&stored.store, 2, Prediction::Off).mapped(true).build().unwrap();
    let want = run(&builder(&stored.store, 2, Prediction::Off).build().unwrap(), &tokens()).unwrap();
    assert_eq!(run(&mapped, &tokens()).unwrap(), want);
}

#[test]
fn neighbours_change_no_bit() {
    for toy in [sparse(), experts()] {
        let stored = stored(&toy);
        for prediction in WAYS {
            let want = run(&builder(&stored.store, 2, prediction).build().unwrap(), &tokens()).unwrap();
            let engine = builder(&stored.store, 2, prediction).neuron_slots(700).build().unwrap();
            let texts = [tokens(), tokens().into_iter().rev().collect(), tokens()[5..].to_vec()];
            let mut sessions: Vec<_> = texts.iter().map(|_| session(&engine)).collect();
            sessions.iter_mut().zip(&texts).for_each(|(s, text)| s.prefill(&text[..20]).unwrap());
            for step in 20..30 {
                let inputs: Vec<(usize, u32)> = texts.iter().map(|text| text[step]).enumerate().collect();
                engine.decode(&mut sessions, &inputs).unwrap();
                let got: Vec<u32> = sessions[0].logits().iter().map(|v| v.to_bits()).collect();
                assert_eq!(got, want[step - 19], "{prediction:?}, step {step}");
            }
        }
    }
}

#[test]
fn sessions_of_several_threads_share_a_small_cache() {
    let stored = stored(&sparse());
    for prediction in WAYS {
        let want = run(&builder(&stored.store, 2, prediction).build().unwrap(), &tokens()).unwrap();
        let engine = builder(&stored.store, 2, prediction).neuron_slots(512).build().unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| run(&engine, &tokens()).unwrap())).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), want, "{prediction:?}");
            }
        });
    }
}
