//! What a plugin and its unit say of themselves, and answers to questions.

use neuropil_device::{ActivationKind, Stage};
use neuropil_plugin_abi::{
    self as abi, AbiStruct, NEUROPIL_PLUGIN_ABI_MAJOR, NEUROPIL_PLUGIN_ABI_MINOR, NpHost, NpQuery, NpStatus,
    NpSupport,
};

use super::{least, plain};
use crate::border::{Border, Library, query};
use crate::case::{Cases, Ended, Found, Stop, ensure};
use crate::raw::{BREACH, Failure, Info, Padded, shortened};
use crate::sample::{Kind, SCHEMES};
use crate::subject::{Op, Question, Subject};

/// Makes a question of a good one.
type Change = fn(NpQuery) -> NpQuery;

const NOTHING: Ended = Ok(Found { error: None, ns: None });

fn said<T>(what: &str, result: Result<T, Failure>) -> Result<T, Stop> {
    result.map_err(|failure| Stop::failed(what, &failure))
}

/// The table and the function that gives it: what can be seen before a unit is opened.
pub fn of_library<'a>(library: &'a Library, cases: &mut Cases<'a>) {
    let plugin = &library.plugin;
    let host = |abi_major, abi_minor| NpHost { abi_major, abi_minor, ..NpHost::new() };
    let (major, minor) = (NEUROPIL_PLUGIN_ABI_MAJOR, NEUROPIL_PLUGIN_ABI_MINOR);
    let serves = [
        ("this-version", Some(host(major, minor)), false, true),
        ("a-newer-minor-version", Some(host(major, minor + 7)), false, true),
        ("a-host-with-more-fields", Some(host(major, minor + 7)), true, true),
        ("another-major-version", Some(host(major + 1, 0)), false, false),
        ("major-version-0", Some(host(0, 0)), false, false),
        ("no-host", None, false, false),
    ];
    for (name, host, more, should) in serves {
        cases.add(format!("info/query/{name}"), move || {
            ensure(plugin.serves(host, more) == should, || match should {
                true => "it gives no table".into(),
                false => "it gives a table".into(),
            })?;
            NOTHING
        });
    }
    cases.add("info/table/names".into(), move || {
        said("the table", plugin.names())?;
        NOTHING
    });
    cases.add("info/table/version".into(), move || {
        let table = plugin.table();
        ensure(table.abi_major == NEUROPIL_PLUGIN_ABI_MAJOR, || {
            format!("it speaks version {}.{}", table.abi_major, table.abi_minor)
        })?;
        NOTHING
    });
    cases.add("info/table/pairs".into(), move || {
        let table = plugin.table();
        let pairs = [
            (
                "import_memory and release_memory",
                table.import_memory.is_some(),
                table.release_memory.is_some(),
            ),
            ("save_plan and load_plan", table.save_plan.is_some(), table.load_plan.is_some()),
        ];
        for (names, one, other) in pairs {
            ensure(one == other, || format!("of {names} it offers only one"))?;
        }
        ensure(table.cluster.is_some() || table.submit_cluster.is_none(), || {
            "it offers submit_cluster without cluster".into()
        })?;
        NOTHING
    });
    cases.add("info/probe/units".into(), move || {
        let units = said("probe", plugin.probe(&library.pairs()))?;
        ensure(!units.is_empty(), || "there is no unit with these options, so nothing can be tested".into())?;
        units.iter().try_for_each(sound)?;
        NOTHING
    });
    cases.add("info/probe/again".into(), move || {
        let first = said("probe", plugin.probe(&library.pairs()))?;
        let second = said("probe", plugin.probe(&library.pairs()))?;
        ensure(first == second, || "it tells of other units the second time".into())?;
        NOTHING
    });
    cases.add("info/probe/no-options-struct".into(), move || {
        // The plugin may need an option to find its unit, but must not take NULL for a mistake of its own.
        match plugin.probe_options(std::ptr::null()) {
            Err(failure) if failure.code == BREACH => Err(Stop::failed("probe", &failure)),
            _ => NOTHING,
        }
    });
    for (name, key) in [("unknown", "no-such-option"), ("unknown-utf-8", "größe"), ("empty", "")] {
        cases.add(format!("info/options/{name}"), move || {
            let mut pairs = library.pairs();
            pairs.push((key, "1"));
            match plugin.probe(&pairs) {
                Err(failure) if failure.code == abi::NP_INVALID && !failure.text.is_empty() => NOTHING,
                Err(failure) => Err(Stop::failed("probe with an option that there is not", &failure)),
                Ok(_) => Err(Stop::wrong("it takes an option that it does not know, so a slip is not seen")),
            }
        });
    }
    cases.add("info/open/no-such-unit".into(), move || match plugin.open(u64::MAX / 2, &library.pairs()) {
        Err(failure) if failure.code != BREACH => NOTHING,
        Err(failure) => Err(Stop::failed("open", &failure)),
        Ok(_) => Err(Stop::wrong("it opens a unit that there is not")),
    });
}

/// What must hold of a unit's description.
fn sound(info: &Info) -> Result<(), Stop> {
    ensure(!info.name.trim().is_empty(), || "a unit has no name".into())?;
    ensure(info.kind <= abi::NP_KIND_NPU, || format!("there is no kind {}", info.kind))?;
    let ascending = info.token_buckets.windows(2).all(|pair| pair[0] < pair[1]);
    ensure(ascending && info.token_buckets.first() != Some(&0), || {
        format!("the token buckets {:?} are not ascending from 1", info.token_buckets)
    })?;
    let alignment = info.memory_alignment;
    ensure(alignment == 0 || alignment.is_power_of_two(), || {
        format!("the alignment {alignment} is no power of two")
    })
}

/// An open unit: its description and its answers.
pub fn of_unit<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    cases.add("info/unit/description".into(), move || {
        sound(&said("info", border.device.try_info())?)?;
        NOTHING
    });
    cases.add("info/unit/again".into(), move || {
        let first = said("info", border.device.try_info())?;
        ensure(first == said("info", border.device.try_info())?, || "it says something else later".into())?;
        NOTHING
    });
    cases.add("info/unit/kinds-of-memory".into(), move || {
        let info = said("info", border.device.try_info())?;
        let offers = border.device.table().import_memory.is_some();
        ensure(offers || info.memory_kinds == 0, || {
            format!("it takes memory of kinds {}, but does not offer import_memory", info.memory_kinds)
        })?;
        NOTHING
    });
    cases.add("info/unit/offers-something".into(), move || {
        super::errors::offered(border)?;
        NOTHING
    });
    cases.add("info/unit/opened-twice".into(), move || {
        let other = said("opening the unit again", border.library.open(0))?;
        let (one, two) = (said("info", border.device.try_info())?, said("info", other.device.try_info())?);
        ensure(one == two, || "two devices of one unit say different things".into())?;
        NOTHING
    });
    for kind in border.kinds() {
        let scheme = kind.name();
        cases.add(format!("info/answer/{scheme}/matmul"), move || asked(border, kind, Op::Matmul));
        for stage in Stage::ALL {
            let op = Op::Cluster(stage, ActivationKind::Silu, kind);
            cases.add(format!("info/answer/{scheme}/{}", stage.name()), move || asked(border, kind, op));
        }
    }
    let unknown: [(&str, Change); 5] = [
        ("operation", |query| NpQuery { op: 99, ..query }),
        ("operation-0", |query| NpQuery { op: 0, ..query }),
        ("scheme", |query| NpQuery { scheme: 99, ..query }),
        ("scheme-0", |query| NpQuery { scheme: 0, ..query }),
        ("group", |query| NpQuery { scheme: abi::NP_SCHEME_GROUP8, group: 48, ..query }),
    ];
    for (name, change) in unknown {
        cases.add(format!("info/unknown/{name}"), move || not_known(border, change(plain_query(border))));
    }
    let of_clusters: [(&str, Change); 5] = [
        ("stage", |query| NpQuery { stage: 99, ..query }),
        ("stage-0", |query| NpQuery { stage: 0, ..query }),
        ("activation", |query| NpQuery { activation: 99, ..query }),
        ("activation-0", |query| NpQuery { activation: 0, ..query }),
        ("down-scheme", |query| NpQuery { down_scheme: 99, ..query }),
    ];
    for (name, change) in of_clusters {
        cases.add(format!("info/unknown/{name}"), move || {
            let query = NpQuery {
                op: abi::NP_OP_CLUSTER,
                down_scheme: abi::NP_SCHEME_F32,
                stage: abi::NP_STAGE_FUSED,
                activation: abi::NP_ACT_SILU,
                ..plain_query(border)
            };
            not_known(border, change(query))
        });
    }
    structs(border, cases);
    statuses(border, cases);
}

fn plain_query(border: &Border) -> NpQuery {
    query(&Question {
        op: Op::Matmul,
        kind: Kind::Scheme(abi::NP_SCHEME_F32),
        rows: 40,
        cols: 64,
        tokens: least(border),
    })
}

/// An answer in words.
fn shown(answer: &Result<u32, Failure>) -> String {
    match answer {
        Ok(flags) => format!("yes ({flags})"),
        Err(failure) => format!("no ({failure})"),
    }
}

/// Asks twice: the answer is whole and stays the same. Of what a unit does not do, the reason is the result.
fn asked(border: &Border, kind: Kind, op: Op) -> Ended {
    let (rows, cols) = plain(kind);
    let rows = if op == Op::Matmul { rows } else { 32 };
    let question = Question { op, kind, rows, cols, tokens: least(border) };
    let (first, second) = (border.device.query(&query(&question)), border.device.query(&query(&question)));
    ensure(first == second, || format!("it answers {}, and then {}", shown(&first), shown(&second)))?;
    border.ask(&question).map_err(Stop::answer)?;
    NOTHING
}

/// What a unit does not know is a no with a reason.
fn not_known(border: &Border, query: NpQuery) -> Ended {
    match border.device.query(&query) {
        Err(failure) if failure.code == abi::NP_UNSUPPORTED && !failure.text.is_empty() => NOTHING,
        Err(failure) if failure.code == abi::NP_UNSUPPORTED => Err(Stop::wrong("its no has no reason")),
        Err(failure) => Err(Stop::failed("the question", &failure)),
        Ok(flags) => Err(Stop::wrong(format!("it answers yes ({flags})"))),
    }
}

/// Questions and answers of hosts that know more or fewer fields.
fn structs<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    cases.add("info/newer/question".into(), move || {
        let plain = plain_query(border);
        let want = border.device.query(&plain);
        let mut support = NpSupport::new();
        let longer = Padded::new(plain);
        let found = border.device.query_structs(longer.pointer(), &mut support);
        let found = found.map(|()| support.flags);
        ensure(found == want, || {
            format!("to a longer question it answers {} instead of {}", shown(&found), shown(&want))
        })?;
        NOTHING
    });
    cases.add("info/newer/answer".into(), move || {
        let plain = plain_query(border);
        let want = border.device.query(&plain);
        let mut support = Padded::new(NpSupport::new());
        let found = border.device.query_structs(&plain, support.pointer_mut());
        let found = found.map(|()| support.known.flags);
        ensure(found == want, || {
            format!("with a longer answer it says {} instead of {}", shown(&found), shown(&want))
        })?;
        ensure(support.is_whole(), || "it writes behind the fields that it knows".into())?;
        NOTHING
    });
    for (name, size) in [("without-a-size", 0), ("of-its-size-alone", 4), ("that-ends-before-rows", 24)] {
        cases.add(format!("info/older/question-{name}"), move || {
            let mut support = NpSupport::new();
            let short = shortened(plain_query(border), size);
            match border.device.query_structs(&short, &mut support) {
                Err(failure) if failure.code == BREACH => Err(Stop::failed("the question", &failure)),
                Err(_) => NOTHING,
                Ok(()) => Err(Stop::wrong("it answers yes to a question without its fields")),
            }
        });
    }
    cases.add("info/older/no-question".into(), move || {
        match border.device.query_structs(std::ptr::null(), &mut NpSupport::new()) {
            Err(failure) if failure.code == BREACH => Err(Stop::failed("the question", &failure)),
            Err(_) => NOTHING,
            Ok(()) => Err(Stop::wrong("it answers yes to no question")),
        }
    });
}

/// Statuses of all sizes, and texts that are cut.
fn statuses<'a>(border: &'a Border, cases: &mut Cases<'a>) {
    const WHOLE: usize = 40;
    for (name, size, room) in [
        ("without-room", WHOLE, 0),
        ("with-room-for-a-byte", WHOLE, 1),
        ("with-room-for-7-bytes", WHOLE, 7),
        ("with-room-for-64-bytes", WHOLE, 64),
        ("of-code-alone", 8, 0),
        ("that-ends-before-the-text", 16, 0),
        ("that-ends-before-the-written-bytes", 32, 0),
    ] {
        cases.add(format!("info/status/{name}"), move || {
            let mut text = [b'#'; 96];
            let mut status = shortened(NpStatus::new(), size);
            status.code = -1;
            status.text_bytes = 77;
            (status.text, status.text_capacity) = (text.as_mut_ptr().cast(), room as u64);
            let code = border.device.query_status(&NpQuery { op: 99, ..plain_query(border) }, &mut status);
            ensure(code == abi::NP_UNSUPPORTED, || format!("it answers {code}"))?;
            ensure(status.code == code, || format!("it returns {code}, but writes {}", status.code))?;
            ensure(text[room..].iter().all(|byte| *byte == b'#'), || "it writes past the room".into())?;
            if size < WHOLE {
                ensure(status.text_bytes == 77, || "it writes past the status".into())?;
                return NOTHING;
            }
            let bytes = usize::try_from(status.text_bytes).unwrap_or(usize::MAX);
            ensure(bytes <= room, || format!("it says that it wrote {bytes} bytes into {room}"))?;
            ensure(str::from_utf8(&text[..bytes]).is_ok(), || "the text is cut inside a character".into())?;
            NOTHING
        });
    }
    for (scheme, name) in SCHEMES {
        cases.add(format!("info/no-device/{name}"), move || {
            let query = NpQuery { scheme, group: crate::sample::group(scheme), ..plain_query(border) };
            match border.device.nobody().query(&query) {
                Err(failure) if failure.code == BREACH => Err(Stop::failed("the question", &failure)),
                Err(_) => NOTHING,
                Ok(_) => Err(Stop::wrong("it answers yes without a device")),
            }
        });
    }
}
