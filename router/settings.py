"""Settings of ``warmroute router``. The front door makes flags, environment and TOML keys of the fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from events.address import AddressError, host_and_port
from router.body import BodyPace
from router.doors import parse_keys
from router.errors import SettingsError
from router.outliers import OutlierRules
from router.policies import policy_named
from router.replicas import checked_url, parse_replicas
from router.retries import RetryRules
from router.rules import Rule, Rules
from router.server import Limits

SAME = "same"
AMONG_WORKERS = ("127.0.0.1", 0)
"""Where workers ask each other for their pages when those have no address of their own."""
UPSTREAM_CLIENTS = ("pool", "aiohttp")
ADMIN_PORT_OFFSET = 1000
COMPANIONS = (
    ("tls_key", "tls_cert"),
    ("tls_client_ca", "tls_cert"),
    ("upstream_key", "upstream_cert"),
    ("queue_limit", "max_inflight"),
)
"""Settings that only count beside another one."""


def parse_tokenizers(lines: Iterable[str]) -> dict[str, str]:
    """Where the local tokenizers are, by model. Raises SettingsError."""
    sources: dict[str, str] = {}
    for line in lines:
        model, _, source = line.partition("=")
        if not model.strip() or not source.strip():
            raise SettingsError(f"--tokenizer {line!r}: write MODEL=FOLDER or MODEL=NAME_ON_HUB")
        if model.strip() in sources:
            raise SettingsError(f"--tokenizer {model.strip()} is given twice; give one for each model")
        sources[model.strip()] = source.strip()
    return sources


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to listen, what to route to, and by which policy."""

    HEADINGS: ClassVar[dict[str, str]] = {
        "listen": "Addresses, workers and keys",
        "map": "Index and replicas",
        "policy": "Policies and what they go by",
        "request_limit_bytes": "Clients",
        "max_inflight": "Full replicas",
        "attempts": "Failing replicas",
        "connect_timeout_s": "Connections to replicas",
        "tokenize_timeout_s": "Tokens",
        "shutdown_delay_s": "Going down, and looking in",
    }
    """In the help, by the first field that stands below each."""

    listen: Annotated[str, Meta(description="Address to serve on, HOST:PORT; port 0 picks a free one.")] = (
        "127.0.0.1:8080"
    )
    admin_listen: Annotated[
        str | None,
        Meta(
            description="Address of /metrics and /debug, HOST:PORT; 'same': on --listen, for everybody. "
            "None: on 127.0.0.1, at the port of --listen plus 1000."
        ),
    ] = None
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes on --listen. Worker n has its pages at --admin-listen's port + n; "
            "each shows all.",
        ),
    ] = 1
    tls_cert: Annotated[
        str | None, Meta(description="Certificate chain to serve https with (PEM); None: plain http.")
    ] = None
    tls_key: Annotated[str | None, Meta(description="Its key (PEM), if it is not in the same file.")] = None
    tls_client_ca: Annotated[
        str | None, Meta(description="Clients must show a certificate of this authority (PEM).")
    ] = None
    upstream_ca: Annotated[
        str | None, Meta(description="Authority of https replicas (PEM); None: the system's.")
    ] = None
    upstream_cert: Annotated[
        str | None, Meta(description="Certificate that https replicas are shown (PEM).")
    ] = None
    upstream_key: Annotated[str | None, Meta(description="Its key (PEM), if it is not in the same file.")] = (
        None
    )
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="A key that requests must carry one of; may be repeated. "
            "NAME=SHA256[,rate=REQUESTS_PER_SECOND][,concurrency=N]; the hash of a key, never the key."
        ),
    ] = ()
    map: Annotated[str | None, Meta(description="Folder of the indexer's map, read in this process.")] = None
    indexer: Annotated[
        str | None,
        Meta(
            description="URL of the indexer: asked for matches if no map can be read, and told of replicas."
        ),
    ] = None
    replica: Annotated[
        tuple[str, ...],
        Meta(
            description="A replica to route to; may be repeated. "
            "NAME=URL[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT]"
            "[,ranks=N][,topic=T][,model=M][,block-size=N][,key=env:NAME|file:PATH]. What is left out is "
            "asked of the engine."
        ),
    ] = ()
    replicas_file: Annotated[
        str | None,
        Meta(
            description="File of replicas, one in each line, or replica = [...] in *.toml; read again when "
            "it changes."
        ),
    ] = None
    dns: Annotated[
        tuple[str, ...],
        Meta(
            description="As --replica, for every address behind the URL's host, asked for again and again; "
            "may be repeated. Each is called NAME-ADDRESS."
        ),
    ] = ()
    kubernetes: Annotated[
        str | None,
        Meta(
            description="As --replica, for every running pod of --kubernetes-selector, whose address takes "
            "the place of the URL's host. Each is called NAME-POD. Needs the extra `kubernetes`."
        ),
    ] = None
    kubernetes_selector: Annotated[
        str | None, Meta(description="Labels of the pods, such as app=vllm,tier=gpu.")
    ] = None
    kubernetes_namespace: Annotated[
        str | None, Meta(description="Namespace of the pods; None: the router's own.")
    ] = None
    discovery_interval_s: Annotated[
        float, Meta(gt=0, description="Between two looks at files and DNS names, seconds.")
    ] = 2.0
    refresh_interval_s: Annotated[
        float, Meta(gt=0, description="Between two looks at a replica's models and event sources, seconds.")
    ] = 30.0
    policy: Annotated[
        str,
        Meta(
            description="cache-aware, lowest-ttft, prefix-hash, session, least-loaded, round-robin or random."
        ),
    ] = "cache-aware"
    policy_parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="Parameters of --policy, as docs/operating.md lists them; as a flag, in JSON."),
    ] = None
    rule: Annotated[
        tuple[Rule, ...],
        Meta(
            description="A rule that gives requests by model, path, headers or tenant a policy of their own; "
            "may be repeated, the first that fits counts. In the file [[router.rule]]; as a flag, in JSON."
        ),
    ] = ()
    tenant_header: Annotated[str, Meta(description="Request header that names the tenant, for rules.")] = (
        "x-tenant-id"
    )
    allow_override: Annotated[
        bool,
        Meta(
            description="Let requests choose: x-warmroute-policy names a policy, x-warmroute-replica a "
            "replica (NAME or NAME/RANK)."
        ),
    ] = False
    lookup_timeout_s: Annotated[float, Meta(gt=0, description="Time for asking the index, seconds.")] = 0.2
    poll_interval_s: Annotated[
        float,
        Meta(ge=0, description="Between two looks at a replica's own load (/metrics), seconds; 0: never."),
    ] = 1.0
    ask_usage: Annotated[
        bool,
        Meta(
            description="Ask engines for the usage of streams (include_usage) to learn from it, and keep "
            "from clients what they did not ask for."
        ),
    ] = True
    request_limit_bytes: Annotated[int, Meta(ge=1, description="Largest request body, bytes.")] = (
        64 * 1024 * 1024
    )
    header_limit_bytes: Annotated[
        int, Meta(ge=1024, description="Longest header, and longest request target, both ways, bytes.")
    ] = 64 * 1024
    header_limit_count: Annotated[int, Meta(ge=1, description="Most headers, both ways.")] = 256
    head_timeout_s: Annotated[
        float, Meta(gt=0, description="Time for the head of a request to come whole, seconds.")
    ] = 30.0
    body_idle_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest silence of a client in a request body, seconds.")
    ] = 30.0
    body_least_bytes_s: Annotated[
        int,
        Meta(
            ge=0,
            description="Slowest request body, bytes a second on the whole, after --body-idle-timeout-s; "
            "0: any.",
        ),
    ] = 1000
    client_idle_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time in which a client takes nothing of its answer, seconds."),
    ] = 600.0
    keepalive_s: Annotated[
        float, Meta(gt=0, description="How long a client's connection is kept without a request, seconds.")
    ] = 3630.0
    backlog: Annotated[int, Meta(ge=1, description="Connections that may wait to be accepted.")] = 1024
    forwarded: Annotated[
        bool,
        Meta(description="Whether replicas are told where a request came from (Forwarded, X-Forwarded-*)."),
    ] = True
    max_inflight: Annotated[
        int | None,
        Meta(
            description="Requests at once on one rank of a replica, other routers' included; 503 when all "
            "are full. None: no limit.",
        ),
    ] = None
    queue_limit: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that may wait when all replicas have --max-inflight; those with a lower "
            "priority (`priority` in the body, X-Vllm-Priority) go first. 0: 503 at once.",
        ),
    ] = 0
    queue_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest wait for a replica with room, seconds; then 503.")
    ] = 30.0
    attempts: Annotated[
        int, Meta(ge=1, description="Replicas tried for one request, as long as none has answered a byte.")
    ] = 3
    retry_server_errors: Annotated[
        bool,
        Meta(description="Whether an answer of 5xx is tried elsewhere, before a byte of it was passed on."),
    ] = True
    deaths_per_request: Annotated[
        int,
        Meta(
            ge=1,
            description="Replicas that may break off without an answer while they work on one request; then "
            "it is tried no more: it may be what kills them.",
        ),
    ] = 2
    retry_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of all requests in flight that may be retries at replicas which fail others "
            "too. Retries at replicas that work do not count.",
        ),
    ] = 0.2
    retry_least: Annotated[int, Meta(ge=0, description="Such retries in flight that are always allowed.")] = 3
    eject_after: Annotated[
        int,
        Meta(ge=0, description="Failed requests in a row that keep a replica from more of them; 0: never."),
    ] = 5
    eject_s: Annotated[
        float, Meta(gt=0, description="How long the first time, seconds; doubled each time after.")
    ] = 5.0
    eject_max_s: Annotated[float, Meta(gt=0, description="How long at most, seconds.")] = 120.0
    eject_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of the healthy replicas that may be kept out at once.")
    ] = 0.5
    slow_start_s: Annotated[
        float,
        Meta(ge=0, description="Time in which a replica that came back grows to a full candidate, seconds."),
    ] = 10.0
    health_interval_s: Annotated[
        float, Meta(gt=0, description="Between two health checks of a replica, seconds.")
    ] = 2.0
    health_timeout_s: Annotated[float, Meta(gt=0, description="Time for one health check, seconds.")] = 2.0
    connect_timeout_s: Annotated[float, Meta(gt=0, description="Time to connect to a replica, seconds.")] = (
        2.0
    )
    idle_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest silence of a replica in an answer, seconds.")
    ] = 600.0
    upstream_keepalive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a connection to a replica is kept without a request, seconds; shorter than "
            "the replica keeps it (vLLM: 5 s). 0: none is kept.",
        ),
    ] = 4.0
    upstream_client: Annotated[
        str,
        Meta(
            description="What sends requests to replicas: 'pool', connections of our own, or 'aiohttp', its "
            "client session, which costs more CPU."
        ),
    ] = "pool"
    tokenize_timeout_s: Annotated[
        float, Meta(gt=0, description="Time for tokenising a prompt, here or by an engine, seconds.")
    ] = 2.0
    tokenizer: Annotated[
        tuple[str, ...],
        Meta(
            description="Tokenise a model's prompts here; may be repeated. MODEL=FOLDER or MODEL=NAME_ON_HUB."
            " Needs the extra local-tokenizer; used as long as the engines' /tokenize agrees."
        ),
    ] = ()
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=256, description="Threads that tokenise, for all local tokenizers.")
    ] = 2
    tokenizer_check_interval_s: Annotated[
        float,
        Meta(gt=0, description="Between two comparisons of a local tokenizer with the engines', seconds."),
    ] = 600.0
    token_cache_tokens: Annotated[
        int, Meta(ge=0, description="Prompts kept tokenised, in tokens (4 bytes each).")
    ] = 4_000_000
    key_cache_blocks: Annotated[
        int, Meta(ge=0, description="Block keys of prompts kept, in blocks (8 bytes each).")
    ] = 500_000
    shutdown_delay_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Time between /ready saying no and the door closing at shutdown, seconds: what a "
            "balancer needs to notice.",
        ),
    ] = 0.0
    grace_s: Annotated[float, Meta(ge=0, description="Time that open answers get at shutdown, seconds.")] = (
        25.0
    )
    decisions_kept: Annotated[int, Meta(ge=1, description="Decisions shown at /debug/decisions.")] = 200
    seed: Annotated[int | None, Meta(description="Seed of the tie-break, for runs that repeat.")] = None

    def admin_address(self) -> tuple[str, int] | None:
        """Where /metrics and /debug are; None: where everything is. Raises SettingsError."""
        if self.admin_listen == SAME:
            return None
        try:
            if self.admin_listen is not None:
                return host_and_port(self.admin_listen)
            _, port = host_and_port(self.listen)
        except AddressError as error:
            raise SettingsError(f"--admin-listen: {error}") from error
        beside = port + ADMIN_PORT_OFFSET
        has_room = beside + self.workers <= 1 << 16
        return "127.0.0.1", 0 if port == 0 else beside if has_room else port - ADMIN_PORT_OFFSET

    def limits(self) -> Limits:
        """What a client's connection may take."""
        return Limits(
            header_bytes=self.header_limit_bytes,
            headers=self.header_limit_count,
            head_s=self.head_timeout_s,
            keepalive_s=self.keepalive_s,
        )

    def retry_rules(self) -> RetryRules:
        """How often, and how much at once, may be tried again."""
        return RetryRules(
            attempts=self.attempts,
            deaths=self.deaths_per_request,
            share=self.retry_share,
            least=self.retry_least,
        )

    def body_pace(self) -> BodyPace:
        """How slow a request's body may be."""
        return BodyPace(idle_s=self.body_idle_timeout_s, least_bytes_s=self.body_least_bytes_s)

    def outlier_rules(self) -> OutlierRules:
        """The rules by which failing replicas are kept from requests."""
        return OutlierRules(
            after=self.eject_after,
            base_s=self.eject_s,
            max_s=self.eject_max_s,
            share=self.eject_share,
            slow_start_s=self.slow_start_s,
        )

    def rules(self) -> Rules:
        """The policies of requests. Raises SettingsError."""
        return Rules(
            self.rule,
            policy_named(self.policy, self.policy_parameters),
            tenant_header=self.tenant_header,
            allow_override=self.allow_override,
        )

    def check(self) -> None:
        """Raises SettingsError, which names the setting, for values that no router could run with. Looks at
        nothing but the values.
        """
        try:
            host_and_port(self.listen)
        except AddressError as error:
            raise SettingsError(str(error)) from error
        admin = self.admin_address()
        if admin is not None and admin[1] and admin == host_and_port(self.listen):
            raise SettingsError(
                f"--admin-listen {self.admin_listen} is --listen too; write 'same' to have it so"
            )
        _, port = admin or ("", 0)
        if port + self.workers > 1 << 16:
            raise SettingsError(
                f"--admin-listen: the pages of {self.workers} workers would be at port {port} and after, "
                f"and there is none above 65535; choose {(1 << 16) - self.workers} or less"
            )
        self.rules()
        parse_replicas(self.replica)
        parse_replicas(self.dns)
        if self.kubernetes is not None:
            parse_replicas([self.kubernetes])
        if (self.kubernetes is None) != (self.kubernetes_selector is None):
            raise SettingsError("--kubernetes and --kubernetes-selector: give both or neither")
        parse_tokenizers(self.tokenizer)
        parse_keys(self.api_key)
        if self.upstream_client not in UPSTREAM_CLIENTS:
            raise SettingsError(
                f"--upstream-client {self.upstream_client}: choose one of {', '.join(UPSTREAM_CLIENTS)}"
            )
        if self.indexer is not None:
            checked_url("--indexer", self.indexer)
        if self.max_inflight is not None and self.max_inflight < 1:
            raise SettingsError(
                f"--max-inflight {self.max_inflight}: give 1 or more, or leave it out for no limit"
            )
        self._check_companions()
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsError(f"--{name.replace('_', '-')} {value}: give a number of seconds")

    def _check_companions(self) -> None:
        """Refuses settings that would do nothing for want of another one: a door that somebody believes to be
        locked is open then.
        """
        for name, companion in COMPANIONS:
            if getattr(self, name) and getattr(self, companion) is None:
                flag, wants = (f"--{field.replace('_', '-')}" for field in (name, companion))
                raise SettingsError(f"{flag} does nothing without {wants}; give {wants} too")
