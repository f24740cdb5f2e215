//! The service without its ledger, for the benchmark to compare with: the same steps, and nothing is kept.

use std::sync::Arc;
use std::time::Instant;

use adriaticum::api::{host, inference, key, permission, reply, route, size, validation};
use adriaticum::config::Config;
use adriaticum::error::Failure;
use adriaticum::http::{Head, Request, Response};
use adriaticum::id::RequestId;
use adriaticum::listener::{Limits, Listener, Service, Socket};
use adriaticum::runtime::{Generated, Runtimes, Spent};
use adriaticum::store::Store;

struct WithoutLedger {
    config: Config,
    store: Store,
    runtimes: Option<Runtimes>,
}

impl WithoutLedger {
    fn complete(&self, request: &Request, now: i64) -> Result<Generated, Failure> {
        host::check(&request.head, &self.config.api_hosts)?;
        route::check(&request.head)?;
        let body = size::check(request)?;
        let caller = key::authenticate(&request.head, &self.store, now)?;
        permission::check(&caller.permissions)?;
        let mut chat = validation::read(&request.head, body, self.config.compatibility)?;
        let runtimes = inference::configured(self.runtimes.as_ref())?;
        inference::run(runtimes, &mut chat, |_| false, &mut Spent::default())
    }
}

impl Service for WithoutLedger {
    fn answer(&self, request: &Request, received: Instant) -> Response {
        let (id, now) = (RequestId::new(), time::OffsetDateTime::now_utc().unix_timestamp());
        let result = self.complete(request, now);
        log::info!("{id} total_ms={:.3}", received.elapsed().as_secs_f64() * 1000.0);
        match result {
            Ok(generated) => reply::completion(id, now, &generated),
            Err(failure) => reply::error(id, &failure),
        }
    }

    fn refuse(&self, _: Option<std::net::IpAddr>, _: Option<&Head>, failure: Failure) -> Response {
        reply::error(RequestId::new(), &failure)
    }
}

fn main() -> std::io::Result<()> {
    let config = Config::load(None).expect("the benchmark should set what is needed");
    adriaticum::logging::start(config.log_level);
    let socket = Socket::bind(&config.listen)?;
    let limits = Limits { workers: config.workers, queue: config.queue, ..Limits::default() };
    let listener = Listener::new(vec![socket], limits)?;
    let service = WithoutLedger {
        store: Store::open(&config.database).expect("the database should open"),
        runtimes: Runtimes::new(&config.runtime, config.workers),
        config,
    };
    listener.run(Arc::new(service))
}
