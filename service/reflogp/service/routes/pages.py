"""Serve the web pages: the list of jobs, a page for each job, references, and sign-in.

Pages are rendered on the server. In the browser, a script keeps the open page up to date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import parse_qs, quote

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from reflogp.scoring.reports.charts import STYLE
from reflogp.service.auth import SIGNED_IN_SECONDS, Required, caller, cookie_name, entry_of, require_scope
from reflogp.service.bodies import read_body, require_type
from reflogp.service.context import Context
from reflogp.service.models import JOB_STATES, UNFINISHED, DatasetSpec, Job
from reflogp.service.problems import Problem, problem_of
from reflogp.service.sites import is_of_own_page
from reflogp.store import ReflogpError, texts
from reflogp.store.texts import hide_secrets, visible

#: Number of jobs per page of the list of jobs, and maximum size of a sign-in form in bytes.
_JOBS, _FORM_BYTES = 50, 16 << 10
#: Headers of every page. The module `sites` then adds its HEADERS, except those that are already set here.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
}
_FOLDER = "reflogp.service.pages"
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

#: A function that takes a request and the caller's name, and returns the response.
_Handler = Callable[[Request, str], Awaitable[Response]]


def pages_router(context: Context) -> APIRouter:
    """Return the routes for all pages.

    If the settings contain tokens, all pages except /signin, /signout and /static require one: in the cookie or a header.
    """
    pages = _Pages(context)
    router = APIRouter(include_in_schema=False)
    router.get("/")(pages.shown(pages.jobs))
    router.get("/jobs")(pages.shown(pages.jobs))
    router.get("/jobs/{job_id}")(pages.shown(pages.job))
    router.get("/references")(pages.shown(pages.references))
    router.post("/jobs/{job_id}/cancel")(pages.shown(pages.cancel, "jobs"))
    router.post("/jobs/{job_id}/retry")(pages.shown(pages.retry, "jobs"))
    router.get("/signin")(pages.shown(pages.ask_token, None))
    router.post("/signin")(pages.shown(pages.sign_in, None))
    router.post("/signout")(pages.shown(pages.sign_out, None))
    router.get("/static/{name}")(pages.static)
    return router


class _Pages:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokens = context.settings.tokens
        folder = files(_FOLDER) / "static"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if _suffix(entry.name) in _MEDIA_TYPES}
        self._files[STYLE.name] = STYLE.read_bytes()
        self._templates = Environment(
            loader=PackageLoader(_FOLDER),
            autoescape=True,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        for name in ("number", "percent", "duration", "byte_count", "moment", "machine_moment"):
            self._templates.filters[name] = getattr(texts, name)
        self._templates.filters.update(dataset_name=dataset_name, job_name=job_name)
        self._templates.globals.update(static=self._static_url, guarded=bool(self._tokens))

    def shown(self, handler: _Handler, scope: Required | None = "read") -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler in a route that checks the token, shows errors as pages and adds headers to the response.

        If the settings contain tokens, the caller needs one that permits `scope`. If `scope` is None, anybody is admitted.
        """

        async def answer(request: Request) -> Response:
            try:
                response = await self._answered(handler, scope, request)
            except Problem as problem:
                response = self._error(request, problem)
            except ReflogpError as error:
                response = self._error(request, problem_of(error))
            response.headers.update(_HEADERS)
            return response

        return answer

    async def jobs(self, request: Request, who: str) -> Response:
        state = next((state for state in JOB_STATES if state == request.query_params.get("state")), None)
        before = request.query_params.get("before")
        page = await to_thread.run_sync(self._context.ledger.page, state, before, _JOBS)
        return self._page(
            "jobs.html",
            who,
            page=page,
            state=state,
            states=JOB_STATES,
            before=before,
            unfinished=any(page.counts.get(state) for state in UNFINISHED),
            url=f"{'https' if _came_by_https(request) else 'http'}://{request.url.netloc}",
            references=sorted(self._context.settings.references),
        )

    async def job(self, request: Request, who: str) -> Response:
        job = await self._context.precompute.get(request.path_params["job_id"])
        return self._page("job.html", who, job=job, unfinished=job.state in UNFINISHED)

    async def cancel(self, request: Request, who: str) -> Response:
        job = await self._context.precompute.cancel(request.path_params["job_id"])
        return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)

    async def retry(self, request: Request, who: str) -> Response:
        job = await self._context.precompute.retry(request.path_params["job_id"])
        return RedirectResponse(f"/jobs/{job.id}", HTTPStatus.SEE_OTHER)

    async def references(self, request: Request, who: str) -> Response:
        registry = self._context.registry
        entries = await registry.threads.run(registry.list)
        return self._page("references.html", who, entries=entries, uri=hide_secrets(registry.store.uri))

    async def ask_token(self, request: Request, who: str) -> Response:
        target = _local(request.query_params.get("next", ""))
        if not self._tokens or caller(request, self._tokens):
            return RedirectResponse(target, HTTPStatus.SEE_OTHER)
        return self._page("signin.html", "", next=target, wrong=None)

    async def sign_in(self, request: Request, who: str) -> Response:
        require_type(request, "application/x-www-form-urlencoded")
        body = await read_body(request, _FORM_BYTES)
        form = parse_qs(body.decode("utf-8", "replace"))
        token, target = form.get("token", [""])[0].strip(), _local(form.get("next", [""])[0])
        if self._tokens and entry_of(token, self._tokens) is None:
            wrong = "That token is not valid for this service. Check that you pasted the whole token."
            return self._page("signin.html", "", HTTPStatus.UNAUTHORIZED, next=target, wrong=wrong)
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        if self._tokens:
            response.set_cookie(
                cookie_name(request),
                quote(token),
                max_age=SIGNED_IN_SECONDS,
                path="/",
                secure=_came_by_https(request),
                httponly=True,
                samesite="strict",
            )
        return response

    async def sign_out(self, request: Request, who: str) -> Response:
        response = RedirectResponse("/signin", HTTPStatus.SEE_OTHER)
        response.delete_cookie(cookie_name(request), path="/", secure=_came_by_https(request), httponly=True, samesite="strict")
        return response

    async def static(self, request: Request) -> Response:
        """Return a static file of the package.

        Browsers may cache the file, because its URL contains a digest of its content.
        """
        name = request.path_params["name"]
        if name not in self._files:
            raise Problem(404, f"there is no file {name!r}", "reload the page")
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(self._files[name], headers=headers, media_type=_MEDIA_TYPES[_suffix(name)])

    async def _answered(self, handler: _Handler, scope: Required | None, request: Request) -> Response:
        if request.method == "POST" and not is_of_own_page(request.headers):
            raise Problem(
                403,
                "the form was not sent from a page of this service",
                "use the form on the service's page, or the API",
            )
        if not self._tokens:
            return await handler(request, "loopback")
        entry = caller(request, self._tokens)
        if scope is None:
            return await handler(request, entry.name if entry else "")
        if entry is None:
            here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            target = here if request.method == "GET" else "/"
            return RedirectResponse(f"/signin?next={quote(target, safe='/')}", HTTPStatus.SEE_OTHER)
        require_scope(entry, scope)
        return await handler(request, entry.name)

    def _page(self, template: str, who: str, status: int = 200, **values: object) -> Response:
        here = {"jobs.html": "/", "references.html": "/references"}.get(template)
        values = {"unfinished": False, "here": here, "who": who, **values}
        return HTMLResponse(self._templates.get_template(template).render(values), status)

    def _error(self, request: Request, problem: Problem) -> Response:
        entry = caller(request, self._tokens)
        response = self._page(
            "error.html",
            entry.name if entry else "" if self._tokens else "loopback",
            problem.status,
            code=problem.status,
            title=HTTPStatus(problem.status).phrase,
            detail=hide_secrets(problem.detail),
            next_step=hide_secrets(problem.next_step),
        )
        response.headers.update(problem.headers or {})
        return response

    def _static_url(self, name: str) -> str:
        return f"/static/{name}?v={hashlib.sha256(self._files[name]).hexdigest()[:12]}"


def _shown(value: object) -> object:
    """Escape control and invisible characters in a value that a template displays, for example as ``\\u202e``.

    Line ends and tabs are kept. Values that are not text are returned unchanged.
    """
    return type(value)(visible(value, keep="\n\t")) if isinstance(value, str) else value


def _local(target: str) -> str:
    """Return `target` if it is a path on this service; otherwise return "/", which shows the list of jobs.

    Some targets look like local paths but make browsers open another site: browsers treat //host as a URL of that host, read a
    backslash as a slash, and ignore tabs and line ends. For such targets, return "/" too.
    """
    fits = target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable()
    return target if fits else "/"


def _came_by_https(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", "").split(",")[0].strip().lower())


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def dataset_name(dataset: DatasetSpec) -> str:
    """Return the location of a job's dataset: its URI without what may be secret, its upload's name or its path."""
    return hide_secrets(dataset.uri or "").removesuffix("?…") or dataset.upload or dataset.path or ""


def job_name(job: Job) -> str:
    """Return the name that pages show for a job: its title, else the last part of its dataset's location, else its id."""
    return job.settings.title.strip() or dataset_name(job.dataset).rstrip("/").rpartition("/")[2] or job.id
