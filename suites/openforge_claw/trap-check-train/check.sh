#!/bin/sh
sha256sum --quiet -c SUMS && echo OK
