from tilewright.cli.app import main

main()
