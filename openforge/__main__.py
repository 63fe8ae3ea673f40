from openforge.cli import main

raise SystemExit(main())
