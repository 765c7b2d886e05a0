"""Requests that two servers may read in two ways, by each of which another one is hidden."""

from __future__ import annotations

POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "negative length": POST + b"content-length: -1\r\n\r\n",
    "signed length": POST + b"content-length: +1\r\n\r\na",
    "hexadecimal length": POST + b"content-length: 0x1\r\n\r\na",
    "list of lengths": POST + b"content-length: 1, 1\r\n\r\na",
    "chunks not last": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "invalid chunk size": POST + b"transfer-encoding: chunked\r\n\r\nz\r\n",
    "negative chunk size": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "large chunk size": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk without an end": POST + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "space before colon": POST + b"content-length : 1\r\n\r\na",
    "folded header": POST + b"x: y\r\n content-length: 1\r\n\r\n",
    "bare line feed": b"POST /a HTTP/1.1\nhost: x\ncontent-length: 1\n\na",
    "null in a header": POST + b"x: a\0b\r\n\r\n",
    "size by a hexadecimal prefix": POST
    + b"transfer-encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "chunks by another name": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "vertical tab in a length": POST + b"content-length: \v1\r\n\r\na",
    "two hosts in a line": b"POST http://a/ http://b/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "carriage return alone": POST + b"x: y\rcontent-length: 4\r\n\r\n",
    "no method": b"\0\1\2\r\n\r\n",
    "other version": b"GET /a HTTP/9.9\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
